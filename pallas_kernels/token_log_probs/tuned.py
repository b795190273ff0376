"""Tiles known to be good, with the measurement behind each."""

from typing import NamedTuple, TypeVar

from pallas_kernels.token_log_probs import hopper

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
