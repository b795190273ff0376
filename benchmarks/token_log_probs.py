"""token_log_probs on an NVIDIA GPU: is it right, and how fast beside other implementations in the same run?

    python benchmarks/token_log_probs.py
    python benchmarks/token_log_probs.py --sections ceiling,table --shapes 8192x3584 --budget_s 100

Times are medians of single calls, candidates taking turns because the card's clock moves. Shares are of the bfloat16
product ceiling measured in the same run (torch, 8192 cubed), from useful operations: 2 T D V forward, 6 T D V forward
and backward. Workspace is what is allocated beyond inputs and outputs. Peers that are not installed are told and left
out (pip install liger-kernel[cutedsl], and cut-cross-entropy from Apple's repository). What fails does not stop the
rest; what no longer fits in the budget is skipped.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from support import log_prob_check, log_prob_peers
from support.gpu_timing import MIB, Candidate, Run, jax_candidate

from pallas_kernels.token_log_probs import token_log_probs, token_loss, tune

SECTIONS = ("ceiling", "check", "table", "entropy")
SHAPES = {"16384x2048": (16384, 2048, 151936), "8192x3584": (8192, 3584, 152064)}

OURS = "ours, forward"
OURS_BACKWARD = "ours, one pass, backward"


def ceiling(run: Run, shapes: dict) -> None:
    """torch's products: the ceiling, and the logits alone."""
    cubed = functools.partial(log_prob_peers.torch_product, 8192, 8192, 8192)
    got = run.attempt("torch 8192^3 (the ceiling)", cubed)
    if got:
        run.ceiling = got["tflops"] * 1e12
    for name, (tokens, embed, vocab) in shapes.items():
        run.attempt(
            f"{name} torch, product of the logits alone",
            functools.partial(log_prob_peers.torch_product, tokens, embed, vocab),
        )


# --- ours -----------------------------------------------------------------------------------------------------------


def _times(log_probs, weight):
    return weight * log_probs


def _ours(args: tuple, weight, scale) -> dict[str, Callable]:
    """By name: what makes a candidate. args are hidden, head, targets; each token weighs -1 / tokens."""
    flops = 2.0 * args[0].size * args[1].shape[0]
    options = {"temperature": 1 / scale}

    def forward(hidden, head, targets, **kwargs):
        return token_log_probs(hidden, head, targets, **options, **kwargs)

    def master_gradient(hidden, head, targets, **kwargs):
        """What the trainer calls: the float32 weights get the head's gradient."""
        master = jnp.zeros(head.shape, jnp.float32)

        def loss(hidden, master):
            more = {"master": master, **options, **kwargs}
            return token_loss(_times, weight, hidden, head, targets, **more)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, master)

    def head_gradient(loss_of, hidden, head, targets, **kwargs):
        def loss(hidden, head):
            return loss_of(hidden, head, targets, **options, **kwargs)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)

    def in_two(hidden, head, targets, **kwargs):
        out = token_log_probs(hidden, head, targets, **kwargs)
        return jnp.sum(weight * out.log_prob), out

    one = functools.partial(head_gradient, functools.partial(token_loss, _times, weight))
    mean, total = (lambda out: -jnp.mean(out.log_prob)), (lambda out: out[0][0])
    made = {
        OURS: (forward, 1, mean),
        "ours, forward, no entropy": (functools.partial(forward, entropy=False), 1, mean),
        OURS_BACKWARD: (master_gradient, 3, total),
        "ours, one pass, no entropy, backward": (
            functools.partial(master_gradient, entropy=False),
            3,
            total,
        ),
        "ours, one pass, d_head in bfloat16, backward": (one, 3, total),
        "ours, two passes, backward": (functools.partial(head_gradient, in_two), 3, total),
        "ours, XLA in chunks, backward": (
            functools.partial(master_gradient, implementation="chunked"),
            3,
            total,
        ),
    }
    return {
        name: functools.partial(jax_candidate, function, args, flops * times, loss)
        for name, (function, times, loss) in made.items()
    }


def _jax_peers(args: tuple) -> dict[str, Callable]:
    flops = 2.0 * args[0].size * args[1].shape[0]
    made = {}
    peers = {
        "JAX, logits materialised": log_prob_peers.materialised,
        "JAX, checkpointed chunks of 1024": log_prob_peers.checkpointed,
    }
    for name, function in peers.items():

        def loss(hidden, head, targets, function=function):
            return -jnp.mean(function(hidden, head, targets))

        gradient = jax.value_and_grad(loss, argnums=(0, 1))
        made[name] = functools.partial(jax_candidate, loss, args, flops, lambda out: out)
        made[f"{name}, backward"] = functools.partial(
            jax_candidate, gradient, args, 3 * flops, lambda out: out[0]
        )
    return made


def _torch_peers(args: tuple) -> dict[str, Callable]:
    flops = 2.0 * args[0].size * args[1].shape[0]
    made = {}
    candidate = log_prob_peers.torch_candidate
    for name, make in log_prob_peers.torch_peers(args[1].shape[0]).items():
        if not name.endswith("backward"):
            made[name] = functools.partial(candidate, make, args, flops, False)
            name += ", backward"
        made[name] = functools.partial(candidate, make, args, 3 * flops, True)
    return made


# --- sections -------------------------------------------------------------------------------------------------------


def _inputs(sizes: tuple[int, int, int], seed: int) -> tuple[tuple, jax.Array, jax.Array]:
    given = tune.inputs(*sizes, seed)
    args = given["hidden"], given["head"], given["targets"]
    # Peers have no temperature.
    scale = jnp.ones_like(given["scale"])
    return args, jnp.full_like(scale, -1.0 / sizes[0]), scale


def table(run: Run, name: str, sizes: tuple[int, int, int], rounds: int) -> None:
    """Everything that can be prepared, in turns; a Markdown table."""
    args, weight, scale = _inputs(sizes, 1)
    makers = _ours(args, weight, scale) | _torch_peers(args) | _jax_peers(args)
    found = {label: run.attempt(f"{name} {label}", make) for label, make in makers.items()}
    ready: dict[str, Candidate] = {label: got for label, got in found.items() if got}
    calls = {label: candidate.call for label, candidate in ready.items()}
    timed = tune.in_turns(calls, rounds=rounds, each=1)
    tokens, embed, vocab = sizes
    print(f"\n| T {tokens}, D {embed}, V {vocab} | ms (lowest–highest) | share | × ours | MiB |")
    print("|---|---|---|---|---|")
    for label, ms in timed.items():
        ours = timed.get(OURS_BACKWARD if label.endswith("backward") else OURS)
        ratio = ms.median / ours.median if ours else float("nan")
        share = run.share(ready[label].flops, ms.median)
        workspace = ready[label].workspace
        run.rows.append(
            {"name": f"{name} {label}", "share": share, "MiB": workspace, **ms._asdict()}
        )
        print(
            f"| {label.replace('backward', 'forward and backward')} | {ms.median:.1f} "
            f"({ms.lowest:.1f}–{ms.highest:.1f}) | {share:.2f} | {ratio:.2f} | {workspace:.0f} |"
        )
    lean = 2 * tokens * vocab / MIB
    for ours in (OURS, OURS_BACKWARD):
        print(best_lean(ours, timed, {n: each.workspace for n, each in ready.items()}, lean))
    missing = [label for label, got in found.items() if got is None]
    print(f"left out, see above: {', '.join(missing) or 'nothing'}\n", flush=True)


def best_lean(ours: str, timed: dict, workspace: dict[str, float], limit: float) -> str:
    """Ours beside the fastest of the others of its kind that need less than `limit` MiB, all logits in bfloat16."""
    backward = ours.endswith("backward")
    peers = {
        label: ms.median
        for label, ms in timed.items()
        if label.endswith("backward") == backward
        and not label.startswith("ours")
        and workspace[label] < limit
    }
    if ours not in timed or not peers:
        return f"{ours}: nothing lean to compare with"
    best = min(peers, key=lambda label: peers[label])
    ratio = peers[best] / timed[ours].median
    return f"{ours}: {ratio:.2f} times as fast as the best peer below {limit:.0f} MiB, {best}"


def entropy(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """With and without, nothing else between them."""
    args, weight, scale = _inputs(sizes, 2)
    makers = _ours(args, weight, scale)
    pairs = {
        "forward": (OURS, "ours, forward, no entropy"),
        "one pass": (OURS_BACKWARD, "ours, one pass, no entropy, backward"),
        "kernel of the forward": (),
    }
    for label, names in pairs.items():

        def cost(names=names):
            if names:
                calls = [makers[each]().call for each in names]
            else:
                rows = (*args, scale)
                functions = [
                    functools.partial(tune.forward, None, entropy=wanted)
                    for wanted in (True, False)
                ]
                made = [jax.jit(function).lower(*rows).compile() for function in functions]
                calls = [functools.partial(each, *rows) for each in made]
            timed = tune.in_turns(dict(zip(("with", "without"), calls, strict=True)), 20, 1)
            ms = {key: value.median for key, value in timed.items()}
            return ms | {"entropy costs %": 100 * (ms["with"] / ms["without"] - 1)}

        run.attempt(f"{name} entropy, {label}", cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="which, of " + ",".join(SECTIONS)
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which, of " + ",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=7, help="of the table's turns")
    parser.add_argument("--budget_s", type=float, default=600)
    parser.add_argument("--json", default="", help="where to write everything measured")
    args = parser.parse_args()
    sections, names = args.sections.split(","), args.shapes.split(",")
    if unknown := sorted({*sections} - {*SECTIONS} | {*names} - {*SHAPES}):
        parser.error(f"{unknown} are unknown; sections are {SECTIONS} and shapes {tuple(SHAPES)}")
    shapes = {name: SHAPES[name] for name in names}
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"this needs an NVIDIA GPU, and JAX has {device.device_kind}")
    print(f"{device.device_kind}, jax {jax.__version__}, sections {args.sections}", flush=True)
    run = Run(args.budget_s)
    if "ceiling" in sections:
        ceiling(run, shapes)
    if "check" in sections:
        log_prob_check.check(run)
    for name, sizes in shapes.items():
        if "table" in sections:
            run.attempt(f"{name} table", lambda n=name, s=sizes: table(run, n, s, args.rounds))
        if "entropy" in sections:
            run.attempt(f"{name} entropy", lambda n=name, s=sizes: entropy(run, n, s))
    if "ceiling" in sections:
        ceiling(run, {})
    print(f"{time.perf_counter() - run.begun:.0f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps(run.rows, indent=1, default=float))


if __name__ == "__main__":
    main()
