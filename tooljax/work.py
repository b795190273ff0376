"""Counts the operations of updates, and what share of the devices' rate that was: model FLOPs utilisation (MFU).

Counted are products that the algorithm needs (`tooljax.model.flops`), of tokens that are there: padding, masked pairs
and what is computed a second time lower the share.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tooljax.batch import TrainBatch
from tooljax.model.decoder import DecoderConfig
from tooljax.model.flops import forward_flops, update_flops, visible_pairs

PEAK_FLOPS = {
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Of bfloat16 products a second, dense, by what JAX calls a device begins with: the vendors' data sheets."""


def peak_flops(kind: str) -> float | None:
    """Of a device; None for one that is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), None)


@dataclass
class Work:
    """Operations since they were last asked for."""

    device: Any
    """One of those that share the work."""
    devices: int
    flops: float = 0.0

    def add(self, cfg: DecoderConfig, microbatch: TrainBatch, *, backward: bool) -> None:
        """A microbatch, still on the host, was passed forward, and backward too."""
        count = update_flops if backward else forward_flops
        segments = np.asarray(microbatch.segment_ids)
        tokens = int(np.count_nonzero(segments))
        self.flops += count(
            cfg, tokens, visible_pairs(segments, microbatch.trunk_ids), microbatch.loss_tokens
        )

    def metrics(self, update_s: float) -> dict[str, float]:
        """perf/update_tflops since the last call, and perf/mfu over these seconds, for devices that are known."""
        flops, self.flops = self.flops, 0.0
        peak = peak_flops(self.device.device_kind)
        told = {"perf/update_tflops": flops / 1e12}
        if peak is None or not flops:
            return told
        return told | {"perf/mfu": flops / (max(update_s, 1e-9) * self.devices * peak)}
