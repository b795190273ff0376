"""Tiles known to be good, with the measurement behind each."""

from typing import NamedTuple, TypeVar

from pallas_kernels.token_log_probs import hopper, mosaic

T = TypeVar("T")


class Entry(NamedTuple):
    """Serves embeds and vocabularies up to twice as large or small."""

    kernel: str
    embed: int
    vocab: int
    tiles: tuple
    measured: str


# One H200, jax 0.11.2, bfloat16, benchmarks/token_log_probs.py, 2026-11-30; the share is that of the product ceiling.
TABLE = [
    Entry(
        "gpu forward",
        2048,
        151936,
        hopper.Tiles(tile_m=128, tile_n=128, slots=4, cluster=2),
        "16384 tokens: 14.40 ms, 0.88 (64x256: 14.57; 128x192: 14.97; without cluster: 15.72)",
    ),
    Entry(
        "gpu powers",
        2048,
        151936,
        hopper.Tiles(tile_m=128, tile_n=128, slots=4, cluster=1),
        "2048 tokens: 1.97 ms, 0.81 (cluster of 2: 2.02; out_n 64: 2.23; 64x256: 2.09)",
    ),
]


def tiles(kernel: str, embed: int, vocab: int, default: T) -> T:
    """Those of the table's nearest entry, or the default where none is near."""
    near = [
        entry
        for entry in TABLE
        if entry.kernel == kernel
        and 0.5 <= embed / entry.embed <= 2
        and 0.5 <= vocab / entry.vocab <= 2
    ]
    if not near:
        return default
    best = min(near, key=lambda entry: abs(embed - entry.embed) / entry.embed)
    return best.tiles  # type: ignore[return-value]


class Compiled(NamedTuple):
    """Tiles of a TPU kernel that its compiler has been seen to fit into VMEM: for exactly this embed and dtype."""

    kernel: str
    kind: str
    """Of device."""
    embed: int
    dtype: str
    tiles: mosaic.Tiles
    """resident is the most that fits."""
    measured: str


# The estimate of VMEM in tpu.py leaves a margin for the compiler, of 1 to 4 MiB in these kernels; here it costs a pass.
# libtpu 0.0.50.1, benchmarks/token_log_probs_tpu.py, 2026-12-01: compiled for a head [vocab, embed], not run. A bundle
# of the inner loop's static schedule does so many multiply-adds; the matrix units do 65,536 a cycle.
COMPILED = [
    Compiled(
        "tpu gradients",
        "TPU v5p",
        5120,
        "bfloat16",
        mosaic.Tiles(block=128, columns=128, resident=1408),
        "4096 tokens: 3 passes, 20.4 GB, 68,018 multiply-adds a bundle (512, 128, 1024: 4, 28.1 GB, 73,650)",
    ),
    Compiled(
        "tpu gradients",
        "TPU v5p",
        2048,
        "bfloat16",
        mosaic.Tiles(block=512, columns=128, resident=4096),
        "16384 tokens: 4 passes, 11.4 GB (512, 128, 3584: 5, 14.5 GB)",
    ),
]


def compiled(kernel: str, kind: str, embed: int, dtype: str) -> mosaic.Tiles | None:
    """Those of the table, if it has this very case."""
    for entry in COMPILED:
        if (entry.kernel, entry.kind, entry.embed, entry.dtype) == (kernel, kind, embed, dtype):
            return entry.tiles
    return None
