"""Over how many devices training is spread, and along what."""

from dataclasses import dataclass
from typing import Annotated

from tooljax.config.types import Range

AxisSize = Annotated[int, Range(low=-1)]
"""A number of devices, or -1."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices of the trainer, as a grid with four axes: what each axis splits is in `tooljax.sharding`. One of them may
    be -1, which takes all devices that the others leave; with none, as many devices are used as their product says."""

    data: AxisSize = 1
    """Copies of the weights; rows of the batch are split over them."""
    fsdp: AxisSize = -1
    """Parts that weights and optimizer state are stored in; weights are put together layer by layer where they are
    used, and rows of the batch are split over these devices too."""
    tensor: AxisSize = 1
    """Parts of attention heads, feed-forward and vocabulary. It must divide the number of key/value heads."""
    context: AxisSize = 1
    """Parts of a row's tokens, for trajectories too long for one device. It must divide batch.row_lengths."""

    @property
    def sizes(self) -> dict[str, int]:
        """By axis."""
        return {
            "data": self.data,
            "fsdp": self.fsdp,
            "tensor": self.tensor,
            "context": self.context,
        }
