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

from pallas_kernels.token_log_probs import chunked, gpu, hopper
from pallas_kernels.token_log_probs.hopper import DEFAULT_TILES, Tiles

SECTIONS = ("ceiling", "check", "forward", "probe", "powers", "products", "fused", "peers")
SHAPES = {"16384x2048": (16384, 2048, 151936), "8192x3584": (8192, 3584, 152064)}

FORWARD_TILES = {
    "128x128 s4 c2": Tiles(),
    "128x128 s4 c1": Tiles(cluster=1),
    "128x128 s4 c2 d0": Tiles(delay=0),
    "128x128 s4 c1 d0": Tiles(cluster=1, delay=0),
    "128x128 s4 c2 g4": Tiles(rows_in_step=4),
    "128x128 s4 c2 g16": Tiles(rows_in_step=16),
    "64x256 s4 c2": Tiles(tile_m=64, tile_n=256),
    "64x256 s4 c1": Tiles(tile_m=64, tile_n=256, cluster=1),
    "128x192 s3 c2": Tiles(tile_n=192, slots=3),
    "128x160 s4 c2": Tiles(tile_n=160, slots=4),
    "64x256 s4 c2 d0": Tiles(tile_m=64, tile_n=256, delay=0),
}
POWERS_TILES = {
    "128x128 s4 c2 o32": Tiles(),
    "128x128 s4 c1 o32": Tiles(cluster=1),
    "128x128 s3 c2 o64": Tiles(slots=3, out_n=64),
    "128x128 s3 c2 o128": Tiles(slots=3, out_n=128),
    "64x256 s4 c2 o32": Tiles(tile_m=64, tile_n=256),
    "64x256 s4 c1 o64": Tiles(tile_m=64, tile_n=256, cluster=1, out_n=64),
    "128x128 s4 c2 o32 d0": Tiles(delay=0),
}
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


def inputs(tokens: int, embed: int, vocab: int, seed: int, spread: float = 2.0) -> dict:
    keys = jax.random.split(jax.random.key(seed), 5)
    hidden = jax.random.normal(keys[0], (tokens, embed), jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocab, embed), jnp.bfloat16)
    head = (head.astype(jnp.float32) * (spread * embed**-0.5)).astype(jnp.bfloat16)
    return {
        "hidden": hidden,
        "head": head,
        "targets": jax.random.randint(keys[2], (tokens,), 0, vocab),
        "scale": jax.random.uniform(keys[3], (tokens,), jnp.float32, 0.7, 1.3),
        "slope": jax.random.normal(keys[4], (tokens,), jnp.float32) / tokens,
    }


def forward(hidden, head, targets, scale, *, vocab_major=True, entropy=True, tiles=DEFAULT_TILES):
    got = gpu.statistics(
        hidden, head, targets, scale, vocab_major=vocab_major, entropy=entropy, tiles=tiles
    )
    log_probs = got["picked"] - jnp.log(got["total"])
    if not entropy:
        return log_probs, log_probs
    return log_probs, jnp.log(got["total"]) - got["weighted"] / got["total"]


def fused(hidden, head, targets, scale, slope, *, chunk, tiles, vocab_major=True, powers_of=None):
    def slope_of_loss(_, start):
        return jax.lax.dynamic_slice_in_dim(slope, start, chunk)

    return gpu.fused_chunks(
        hidden,
        head,
        targets,
        scale,
        slope_of_loss,
        chunk=chunk,
        vocab_major=vocab_major,
        tiles=tiles,
        powers_of=powers_of or gpu.powers_of_chunk,
    )


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
    """Each variant against float64 on fresh inputs, odd sizes, both layouts; outputs poisoned."""
    seed = int.from_bytes(os.urandom(3), "little")
    print(f"seed {seed}")
    tokens, embed, vocab = 1023, 256, 5000
    given = inputs(tokens, embed, vocab, seed)
    hidden, head, scale, slope = (
        np.asarray(given[n], np.float64) for n in ("hidden", "head", "scale", "slope")
    )
    targets = np.asarray(given["targets"])
    logits = hidden @ head.T * scale[:, None]
    below = logits - logits.max(1, keepdims=True)
    log_softmax = below - np.log(np.exp(below).sum(1, keepdims=True))
    exact = log_softmax[np.arange(tokens), targets]
    softmax = np.exp(log_softmax)
    entropy = -(softmax * log_softmax).sum(1)
    d_logits = -softmax * slope[:, None]
    d_logits[np.arange(tokens), targets] += slope
    d_logits *= scale[:, None]
    expected = {"d_hidden": d_logits @ head, "d_head": d_logits.T @ hidden}

    def values(name, function, *args):
        def measure():
            made, _ = compiled(function, *args)
            poison()
            found = [np.asarray(x, np.float64) for x in made(*args)]
            worst = np.abs(found[0] - exact).max(), np.abs(found[1] - entropy).max()
            good = worst[0] < 2e-5 and worst[1] < 4e-5
            return {"": "PASS" if good else "FAIL", "log_prob": worst[0], "entropy": worst[1]}

        run.attempt(name, measure)

    def plain(hidden, head, targets, scale):
        logits = jnp.einsum("TD,VD->TV", hidden, head, preferred_element_type=jnp.float32)
        log_softmax = jax.nn.log_softmax(logits * scale[:, None])
        picked = jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]
        return picked, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)

    args = tuple(given[n] for n in ("hidden", "head", "targets", "scale"))
    turned = (args[0], jnp.array(args[1].T), *args[2:])
    values("check XLA float32 logits", plain, *args)
    for name in list(FORWARD_TILES)[:4] + ["64x256 s4 c2", "128x192 s3 c2"]:
        tiles = FORWARD_TILES[name]
        values(f"check forward {name}", functools.partial(forward, tiles=tiles), *args)
    values("check forward [embed, vocab]", functools.partial(forward, vocab_major=False), *turned)

    even = {n: given[n][:1022] if n != "head" else given[n] for n in given}
    exact_even = exact[:1022]

    def gradients(name, tiles, vocab_major=True):
        def measure():
            full = {**even, "head": even["head"] if vocab_major else jnp.array(even["head"].T)}
            order = ("hidden", "head", "targets", "scale", "slope")
            run_it = functools.partial(fused, chunk=511, tiles=tiles, vocab_major=vocab_major)
            made, _ = compiled(run_it, *(full[n] for n in order), options=CUBLAS)
            poison()
            got = [np.asarray(x, np.float64) for x in made(*(full[n] for n in order))]
            d_head = got[3] if vocab_major else got[3].T
            last = np.outer(d_logits[1022], hidden[1022])  # the token that `even` leaves out
            wanted = expected["d_hidden"][:1022], expected["d_head"] - last
            errors = [
                np.linalg.norm(found - want) / np.linalg.norm(want)
                for found, want in zip((got[2], d_head), wanted, strict=True)
            ]
            worst = np.abs(got[0] - exact_even).max()
            good = worst < 2e-5 and max(errors) < 1e-2
            return {
                "": "PASS" if good else "FAIL",
                "log_prob": worst,
                "entropy": np.abs(got[1] - entropy[:1022]).max(),
                "d_hidden": errors[0],
                "d_head": errors[1],
            }

        run.attempt(name, measure)

    for name in list(POWERS_TILES)[:3] + ["64x256 s4 c2 o32"]:
        gradients(f"check fused {name}", POWERS_TILES[name])
    gradients("check fused [embed, vocab]", Tiles(), vocab_major=False)


def time_forward(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    tokens, embed, vocab = sizes
    given = inputs(tokens, embed, vocab, 1)
    args = tuple(given[n] for n in ("hidden", "head", "targets", "scale"))
    flops = 2 * tokens * embed * vocab
    reference = jax.jit(
        lambda h, w, t, s: chunked.token_log_probs(h, w, t, 1 / s, jnp.ones(t.shape, bool))
    )(*args)

    def measure(**kwargs):
        made, workspace = compiled(functools.partial(forward, **kwargs), *args)
        error = float(jnp.abs(made(*args)[0] - reference[0]).max())
        ms = milliseconds(made, *args)
        return {
            "ms": ms,
            "share": run.share(flops, ms),
            "MiB": workspace,
            "from chunked": error,
            "": "PASS" if error < 2e-4 else "FAIL",
        }

    best, best_ms = "", float("inf")
    for label, tiles in FORWARD_TILES.items():
        got = run.attempt(f"{name} forward {label}", lambda t=tiles: measure(tiles=t))
        if got and got["ms"] < best_ms:
            best, best_ms = label, got["ms"]
    if best:
        run.attempt(
            f"{name} forward {best}, no entropy",
            lambda: measure(tiles=FORWARD_TILES[best], entropy=False),
        )
        run.attempt(f"{name} forward {best}, again", lambda: measure(tiles=FORWARD_TILES[best]))


def time_probe(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """What the reductions of a tile cost: the forward kernel with nearly none of them (its results are wrong)."""
    tokens, embed, vocab = sizes
    given = inputs(tokens, embed, vocab, 7)
    args = tuple(given[n] for n in ("hidden", "head", "targets", "scale"))
    flops = 2 * tokens * embed * vocab
    usual = hopper._reduce_tile

    def row_sums(acc, stats, given):
        del given
        return stats | {"total": stats["total"] + jnp.sum(acc, axis=1)}, acc

    def measure(tiles):
        hopper._reduce_tile = row_sums
        try:
            made, _ = compiled(functools.partial(forward, tiles=tiles), *args)
        finally:
            hopper._reduce_tile = usual
        ms = milliseconds(made, *args)
        return {"ms": ms, "share": run.share(flops, ms)}

    for label in ("128x128 s4 c2", "128x128 s4 c1", "64x256 s4 c2", "128x192 s3 c2"):
        tiles = FORWARD_TILES[label]
        run.attempt(f"{name} row sums only {label}", lambda t=tiles: measure(t))


def time_powers(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    _, embed, vocab = sizes
    given = inputs(2048, embed, vocab, 2)
    args = tuple(given[n] for n in ("hidden", "head", "scale", "slope"))
    flops = 2 * 2048 * embed * vocab

    def measure(tiles):
        made, workspace = compiled(functools.partial(gpu.powers_of_chunk, tiles=tiles), *args)
        ms = milliseconds(made, *args)
        return {"ms": ms, "share": run.share(flops, ms), "MiB": workspace}

    for label, tiles in POWERS_TILES.items():
        run.attempt(f"{name} powers of 2048 tokens {label}", lambda t=tiles: measure(t))


def time_products(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    """XLA's two products of the gradient, for one chunk."""
    _, embed, vocab = sizes
    given = inputs(2048, embed, vocab, 3)
    powers = jax.random.uniform(jax.random.key(4), (2048, vocab), jnp.bfloat16)
    flops = 2 * 2048 * embed * vocab

    def d_hidden(powers, head):
        return gpu.product("CV,VD->CD", powers, head)

    def d_head_chain(powers, hidden):
        def add(_, total):
            return total + gpu.product("CV,CD->VD", powers, hidden)

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


def xla_powers(hidden, head, scale, shift, *, vocab_major, entropy, tiles):
    """powers_of_chunk without a kernel."""
    del tiles
    axes = "CD,VD->CV" if vocab_major else "CD,DV->CV"
    below = gpu.product(axes, hidden, head) * scale[:, None] - shift[:, None]
    powers = jnp.exp(below)
    out = {"powers": powers.astype(hidden.dtype), "total": jnp.sum(powers, axis=1)}
    return out | ({"weighted": jnp.sum(powers * below, axis=1)} if entropy else {})


def time_fused(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    tokens, embed, vocab = sizes
    given = inputs(tokens, embed, vocab, 5)
    args = tuple(given[n] for n in ("hidden", "head", "targets", "scale", "slope"))
    flops = 6 * tokens * embed * vocab

    def measure(options=None, **kwargs):
        made, workspace = compiled(functools.partial(fused, **kwargs), *args, options=options)
        ms = milliseconds(made, *args, repeats=5)
        return {"ms": ms, "share": run.share(flops, ms), "MiB": workspace}

    default = POWERS_TILES["128x128 s4 c2 o32"]
    wide = POWERS_TILES["128x128 s3 c2 o64"]
    variants = {
        "chunk 2048, no Triton": {"chunk": 2048, "tiles": default, "options": CUBLAS},
        "chunk 2048": {"chunk": 2048, "tiles": default},
        "chunk 2048, s3 o64, no Triton": {"chunk": 2048, "tiles": wide, "options": CUBLAS},
        "chunk 1024, no Triton": {"chunk": 1024, "tiles": default, "options": CUBLAS},
        "chunk 2048, XLA powers, no Triton": {
            "chunk": 2048,
            "tiles": default,
            "options": CUBLAS,
            "powers_of": xla_powers,
        },
    }
    for label, kwargs in variants.items():
        run.attempt(f"{name} fused {label}", lambda k=kwargs: measure(**k))


def time_peers(run: Run, name: str, sizes: tuple[int, int, int]) -> None:
    tokens, embed, vocab = sizes
    given = inputs(tokens, embed, vocab, 6)
    args = tuple(given[n] for n in ("hidden", "head", "targets"))
    flops = 2 * tokens * embed * vocab

    def materialised(hidden, head, targets):
        logits = jnp.einsum("TD,VD->TV", hidden, head, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]

    def chunks(hidden, head, targets):
        ones = jnp.ones(targets.shape)
        return chunked.token_log_probs(hidden, head, targets, ones, ones > 0)[0]

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
        "fused": time_fused,
        "peers": time_peers,
    }
    for section, function in timed.items():
        for name, sizes in shapes.items() if section in sections else ():
            run.attempt(f"{name} {section}", lambda f=function, n=name, s=sizes: f(run, n, s))
    print(f"{time.perf_counter() - run.begun:.0f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps(run.rows, indent=1, default=float))


if __name__ == "__main__":
    main()
