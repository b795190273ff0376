"""Kernels of token_log_probs on an NVIDIA GPU: are they right, and how fast beside the matrix products alone?

    python benchmarks/token_log_probs.py
    python benchmarks/token_log_probs.py --sections ceiling,check,forward --budget_s 100

Every figure is in milliseconds and as a share of the bfloat16 product ceiling measured in the same run (torch, 8192
cubed), from useful operations: 2 T D V forward, 6 T D V forward and backward. Workspace is what is allocated beyond
inputs and outputs. What fails is reported and does not stop the rest; what no longer fits in the budget is skipped.
"""

import argparse
import functools
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.token_log_probs import gpu, hopper, token_log_probs, token_loss, tune
from pallas_kernels.token_log_probs.problem import Problem, product

SECTIONS = ("ceiling", "check", "forward", "probe", "powers", "products", "gradient", "peers")
SHAPES = {"16384x2048": (16384, 2048, 151936), "8192x3584": (8192, 3584, 152064)}
CHECKED = [(1023, 256, 5000), (777, 128, 1187), (512, 192, 1216), (64, 64, 128), (1500, 512, 4096)]
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


class Run:
    """Time left, the ceiling, and everything that was measured."""

    def __init__(self, budget_s: float):
        self.begun = time.perf_counter()
        self.budget_s = budget_s
        self.ceiling = float("nan")
        self.rows: list[dict] = []

    def attempt(self, name: str, measure: Callable[[], dict | None]) -> dict | None:
        """Runs and reports one variant; None if it failed or the time is up."""
        begun = time.perf_counter()
        if begun - self.begun > self.budget_s:
            print(f"{name:44s} SKIPPED: {self.budget_s:.0f} s are over", flush=True)
            return None
        try:
            got = measure()
        except Exception as error:
            text = " ".join(str(error).split())
            print(f"{name:44s} FAIL {type(error).__name__}: {text[:400]}", flush=True)
            self.rows.append({"name": name, "error": traceback.format_exc()})
            return None
        if got is None:
            return None
        seconds = time.perf_counter() - begun
        told = "  ".join(f"{key} {_short(value)}" for key, value in got.items())
        print(f"{name:44s} {told}  [{seconds:.1f} s]", flush=True)
        self.rows.append({"name": name, **got})
        return got

    def share(self, flops: float, ms: float) -> float:
        return flops / (ms * 1e-3) / self.ceiling


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compiled(function, *args, options: dict | None = None, **jit_options):
    """The compiled function, and its workspace in MiB."""
    made = jax.jit(function, **jit_options).lower(*args).compile(compiler_options=options)
    memory = made.memory_analysis()
    return made, (memory.temp_size_in_bytes if memory else float("nan")) / 2**20


def milliseconds(function, *args, repeats: int = 7) -> float:
    """Median of single calls, each waited for."""
    for _ in range(2):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) * 1e3


def poison() -> None:
    """Fills free memory with NaN, so that what a kernel does not write is seen."""
    jax.block_until_ready(jnp.full((2**29,), jnp.nan, jnp.float32))


# --- sections -----------------------------------------------------------------------------------------------------


def ceiling(run: Run, shapes: dict) -> None:
    """torch's products: the ceiling, and the shapes that matter here."""
    import torch

    def timed(a, b, repeats=10):
        for _ in range(3):
            a @ b
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            a @ b
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats

    def product(m, k, n, *, left_transposed=False, right_transposed=False):
        def make(rows, columns, transposed):
            shape = (columns, rows) if transposed else (rows, columns)
            values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            return values.T if transposed else values

        a, b = make(m, k, left_transposed), make(k, n, right_transposed)
        ms = timed(a, b)
        return {"ms": ms, "tflops": 2 * m * k * n / ms / 1e9}

    got = run.attempt("torch 8192^3 (the ceiling)", lambda: product(8192, 8192, 8192))
    run.ceiling = got["tflops"] * 1e12 if got else 800e12
    for name, (tokens, embed, vocab) in shapes.items():
        run.attempt(
            f"{name} torch logits, bfloat16 out",
            lambda t=tokens, d=embed, v=vocab: product(t, d, v, right_transposed=True),
        )
        run.attempt(
            f"{name} torch d_hidden of 2048 tokens",
            lambda d=embed, v=vocab: product(2048, v, d),
        )
        run.attempt(
            f"{name} torch d_head of 2048 tokens",
            lambda d=embed, v=vocab: product(v, 2048, d, left_transposed=True),
        )
    torch.cuda.empty_cache()


def check(run: Run) -> None:
    """The public functions against float64 on fresh inputs: odd sizes, both layouts, masks, far targets."""
    seed = int.from_bytes(os.urandom(3), "little")
    print(f"seed {seed}")
    for i, (tokens, embed, vocab) in enumerate(CHECKED):
        for head_axes in ("vocab embed", "embed vocab"):
            for spread in (2.0, 60.0):
                run.attempt(
                    f"check {tokens}x{embed}x{vocab} [{head_axes}] spread {spread:.0f}",
                    functools.partial(
                        _checked, (tokens, embed, vocab), seed + i, head_axes, spread
                    ),
                )


def _checked(sizes: tuple[int, int, int], seed: int, head_axes: str, spread: float) -> dict:
    given = tune.inputs(*sizes, seed, spread)
    tokens = sizes[0]
    rng = np.random.default_rng(seed)
    slope = jnp.asarray(rng.normal(size=tokens), jnp.float32)
    valid = jnp.asarray(rng.random(tokens) < 0.8)
    expected = _exact(given, np.asarray(valid), np.asarray(slope, np.float64))
    turned = head_axes == "embed vocab"
    options = {
        "temperature": 1 / given["scale"],
        "valid": valid,
        "head_axes": head_axes,
        "implementation": "gpu",
        "chunk_tokens": 512,
    }
    hidden = jnp.where(valid[:, None], given["hidden"], jnp.nan)
    head = jnp.array(given["head"].T) if turned else given["head"]

    def one_pass(hidden, head):
        return token_loss(_weighted, slope, hidden, head, given["targets"], **options)

    def two_passes(hidden, head):
        out = token_log_probs(hidden, head, given["targets"], **options)
        return jnp.sum(slope * out.log_prob), out

    told = {}
    for name, function in {"one pass": one_pass, "two": two_passes}.items():
        gradient = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
        made, _ = compiled(gradient, hidden, head)
        poison()
        (_, out), (d_hidden, d_head) = made(hidden, head)
        errors = [
            float(np.abs(np.asarray(values, np.float64) - wanted).max())
            for values, wanted in zip(out, expected[:3], strict=True)
        ]
        d_head = d_head.T if turned else d_head
        norms = [
            float(np.linalg.norm(np.asarray(g, np.float64) - w) / np.linalg.norm(w))
            for g, w in zip((d_hidden, d_head), expected[3:], strict=True)
        ]
        good = max(errors) < 2e-5 * spread and max(norms) < 1e-2
        told[name] = "PASS" if good else "FAIL"
        told |= {f"{name} values": max(errors), f"{name} gradients": max(norms)}
    return told | {"lowest": float(expected[0].min())}


def _weighted(log_probs, weight):
    return weight * log_probs


def _exact(given: dict, valid: np.ndarray, slope: np.ndarray) -> tuple[np.ndarray, ...]:
    """log_prob, log_normaliser, entropy, d_hidden and d_head in float64."""
    hidden, head, scale = (np.asarray(given[n], np.float64) for n in ("hidden", "head", "scale"))
    targets, rows = np.asarray(given["targets"]), np.arange(len(hidden))
    logits = hidden @ head.T * scale[:, None]
    highest = logits.max(1)
    log_total = np.log(np.exp(logits - highest[:, None]).sum(1))
    log_softmax = logits - (highest + log_total)[:, None]
    softmax = np.exp(log_softmax)
    d_logits = -softmax * slope[:, None]
    d_logits[rows, targets] += slope
    d_logits *= (scale * valid)[:, None]
    values = log_softmax[rows, targets], highest + log_total, -(softmax * log_softmax).sum(1)
    return *(np.where(valid, x, 0) for x in values), d_logits @ head, d_logits.T @ hidden


def time_forward(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """Every tile in turns, beside a product without reductions, and the public function."""
    tokens, embed, vocab = sizes
    given = tune.inputs(*sizes, 1)
    args = list(given.values())
    flops = 2 * tokens * embed * vocab
    calls, reasons = tune.compiled(tune.FORWARD, tune.forward, args)
    for label, reason in reasons.items():
        print(f"{name} forward {label} FAIL {reason}", flush=True)

    def public(hidden, head, targets, scale, **kwargs):
        options = {"temperature": 1 / scale, "implementation": "gpu", **kwargs}
        return token_log_probs(hidden, head, targets, **options)

    workspaces = {}
    for label, kwargs in {"public": {}, "public, no entropy": {"entropy": False}}.items():
        made, workspaces[label] = compiled(functools.partial(public, **kwargs), *args)
        calls[label] = functools.partial(made, *args)
    slow = jax.jit(functools.partial(public, implementation="chunked"))(*args)
    error = float(jnp.abs(calls["public"]().log_prob - slow.log_prob).max())
    _report_turns(run, f"{name} forward", calls, flops, workspaces)
    run.attempt(f"{name} forward against chunks", lambda: {"log_prob": error})


def _report_turns(run: Run, name: str, calls: dict, flops: float, workspaces: dict) -> None:
    def timed():
        return {n: ms._asdict() for n, ms in tune.in_turns(calls, rounds=5).items()}

    begun = time.perf_counter()
    if begun - run.begun > run.budget_s:
        print(f"{name} SKIPPED: {run.budget_s:.0f} s are over", flush=True)
        return
    for label, ms in timed().items():
        got = {
            "ms": ms["median"],
            "lowest": ms["lowest"],
            "highest": ms["highest"],
            "share": run.share(flops, ms["median"]),
        }
        if label in workspaces:
            got["MiB"] = workspaces[label]
        run.attempt(f"{name} {label}", lambda got=got: got)


def time_probe(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """What the reductions of a tile cost: the forward kernel with nearly none of them (its results are wrong)."""
    args = list(tune.inputs(*sizes, 7).values())
    usual = hopper._reduce_tile

    def row_sums(acc, stats, given):
        del given
        return stats | {"total": stats["total"] + jnp.sum(acc, axis=1)}, acc

    hopper._reduce_tile = row_sums
    try:
        calls, _ = tune.compiled(tune.FORWARD, tune.forward, args)
    finally:
        hopper._reduce_tile = usual
    _report_turns(run, f"{name} row sums only", calls, 2 * np.prod(sizes, dtype=float), {})


def time_powers(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    _, embed, vocab = sizes
    args = list(tune.inputs(2048, embed, vocab, 2).values())
    calls, reasons = tune.compiled(tune.POWERS, tune.powers, args)
    for label, reason in reasons.items():
        print(f"{name} powers {label} FAIL {reason}", flush=True)
    _report_turns(run, f"{name} powers of 2048", calls, 2 * 2048 * embed * vocab, {})


def time_products(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """XLA's two products of the gradient, for one chunk."""
    _, embed, vocab = sizes
    given = tune.inputs(2048, embed, vocab, 3)
    powers = jax.random.uniform(jax.random.key(4), (2048, vocab), jnp.bfloat16)
    flops = 2 * 2048 * embed * vocab

    def d_hidden(powers, head):
        return product("CV,VD->CD", powers, head)

    def d_head_chain(powers, hidden):
        def add(_, total):
            return total + product("CV,CD->VD", powers, hidden)

        return jax.lax.fori_loop(0, 4, add, jnp.zeros((vocab, embed), jnp.float32))

    def measure(function, args, times, options):
        made, workspace = compiled(function, *args, options=options)
        ms = milliseconds(made, *args) / times
        return {"ms": ms, "share": run.share(flops, ms), "MiB": workspace}

    for label, options in {"": None, ", no Triton": CUBLAS}.items():
        run.attempt(
            f"{name} XLA d_hidden of 2048{label}",
            lambda o=options: measure(d_hidden, (powers, given["head"]), 1, o),
        )
        run.attempt(
            f"{name} XLA d_head += of 2048{label}",
            lambda o=options: measure(d_head_chain, (powers, given["hidden"]), 4, o),
        )

    def mosaic():
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as matmul

        config = matmul.TuningConfig(128, 128, 64, 4, grid_tile_width=8)
        return measure(
            lambda a, b: matmul.matmul(a, b, None, config), (powers, given["head"]), 1, None
        )

    run.attempt(f"{name} JAX's Mosaic product for d_hidden", mosaic)


def time_gradient(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """Forward and backward: in one pass and in two, with chunks of several sizes, beside chunks in XLA."""
    tokens, embed, vocab = sizes
    given = tune.inputs(*sizes, 5)
    weight = jax.random.normal(jax.random.key(6), (tokens,), jnp.float32) / tokens
    args = (*given.values(), weight)
    flops = 6 * tokens * embed * vocab

    def direct(hidden, head, targets, scale, weight, **kwargs):
        """With the head's gradient as it is summed, in float32."""
        rows = {"hidden": hidden, "targets": targets, "scale": scale, "weight": weight}
        return gpu.fused(Problem(**kwargs), rows, (head, None), lambda _, rows: rows["weight"])

    def loss_in_one(hidden, head, targets, scale, weight, **kwargs):
        options = {"temperature": 1 / scale, "implementation": "gpu", **kwargs}

        def loss(hidden, head):
            return token_loss(_weighted, weight, hidden, head, targets, **options)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)

    def loss_in_two(hidden, head, targets, scale, weight):
        options = {"temperature": 1 / scale, "implementation": "gpu"}

        def loss(hidden, head):
            return jnp.sum(weight * token_log_probs(hidden, head, targets, **options).log_prob)

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    variants = {
        "one pass, d_head float32": direct,
        "one pass, d_head float32, chunk 1024": functools.partial(direct, chunk_tokens=1024),
        "one pass, d_head float32, chunk 3072": functools.partial(direct, chunk_tokens=3072),
        "one pass, no entropy": functools.partial(direct, entropy=False),
        "one pass, custom gradient": loss_in_one,
        "two passes": loss_in_two,
        "XLA chunks, one pass": functools.partial(loss_in_one, implementation="chunked"),
    }
    calls, workspaces = {}, {}
    for label, function in variants.items():

        def prepare(label=label, function=function):
            made, workspaces[label] = compiled(function, *args)
            calls[label] = functools.partial(made, *args)

        run.attempt(f"{name} gradient, compile {label}", prepare)
    _report_turns(run, f"{name} gradient", calls, flops, workspaces)


def time_peers(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    tokens, embed, vocab = sizes
    args = list(tune.inputs(*sizes, 6).values())[:3]
    flops = 2 * tokens * embed * vocab

    def materialised(hidden, head, targets):
        logits = jnp.einsum("TD,VD->TV", hidden, head, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]

    def chunks(hidden, head, targets):
        return token_log_probs(hidden, head, targets, implementation="chunked").log_prob

    def measure(function, useful):
        made, workspace = compiled(function, *args)
        ms = milliseconds(made, *args, repeats=3)
        return {"ms": ms, "share": run.share(useful, ms), "MiB": workspace}

    for label, function in {"materialised": materialised, "chunked": chunks}.items():
        gradient = jax.grad(lambda *a, f=function: jnp.mean(f(*a)), argnums=(0, 1))
        run.attempt(f"{name} JAX {label} forward", lambda f=function: measure(f, flops))
        run.attempt(f"{name} JAX {label} gradient", lambda g=gradient: measure(g, 3 * flops))
    _torch_compile(run, name, sizes)


def _torch_compile(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    import torch

    tokens, embed, vocab = sizes
    flops = 2 * tokens * embed * vocab
    cuda = {"device": "cuda", "dtype": torch.bfloat16}

    def loss(hidden, head, targets):
        logits = (hidden @ head.T).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    made = torch.compile(loss)

    def measure(backward: bool):
        torch.cuda.empty_cache()
        hidden = torch.randn((tokens, embed), **cuda, requires_grad=backward)
        head = (torch.randn((vocab, embed), **cuda) * embed**-0.5).requires_grad_(backward)
        targets = torch.randint(0, vocab, (tokens,), device="cuda")

        def once():
            hidden.grad = head.grad = None
            out = made(hidden, head, targets)
            if backward:
                out.mean().backward()

        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            begun = time.perf_counter()
            once()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            peak = torch.cuda.max_memory_allocated() - base
        ms = float(np.median(times[3:])) * 1e3
        useful = flops * (3 if backward else 1)
        return {"ms": ms, "share": run.share(useful, ms), "MiB (gradients too)": peak / 2**20}

    run.attempt(f"{name} torch.compile forward", lambda: measure(False))
    run.attempt(f"{name} torch.compile gradient", lambda: measure(True))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--budget_s", type=float, default=600)
    parser.add_argument("--json", default="", help="where to write everything measured")
    args = parser.parse_args()
    sections = args.sections.split(",")
    shapes = {name: SHAPES[name] for name in args.shapes.split(",")}
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"this needs an NVIDIA GPU, and JAX has {device.device_kind}")
    print(f"{device.device_kind}, jax {jax.__version__}, sections {args.sections}", flush=True)
    run = Run(args.budget_s)
    if "ceiling" in sections:
        run.attempt("ceiling", lambda: ceiling(run, shapes))
    else:
        run.ceiling = 800e12
    if "check" in sections:
        run.attempt("check", lambda: check(run))
    timed = {
        "forward": time_forward,
        "probe": time_probe,
        "powers": time_powers,
        "products": time_products,
        "gradient": time_gradient,
        "peers": time_peers,
    }
    for section, function in timed.items():
        for name, sizes in shapes.items() if section in sections else ():
            run.attempt(f"{name} {section}", lambda f=function, n=name, s=sizes: f(run, n, s))
    if "ceiling" in sections:
        run.attempt("ceiling again, after all that", lambda: ceiling(run, {}))
    print(f"{time.perf_counter() - run.begun:.0f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps(run.rows, indent=1, default=float))


if __name__ == "__main__":
    main()
