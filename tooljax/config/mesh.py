"""Over how many devices training is spread, and along what."""

from dataclasses import dataclass
from typing import Annotated

from tooljax.config.types import CountOrZero, Range

AxisSize = Annotated[int, Range(low=-1)]
"""A number of devices, or -1."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices of the trainer, as a grid with four axes: what each axis splits is in `tooljax.sharding`. One of them may
    be -1, which takes all devices that the others leave; with none, as many devices are used as their product says. On
    several hosts these are the devices of all."""

    data: AxisSize = 1
    """Copies of the weights; rows of the batch are split over them."""
    fsdp: AxisSize = -1
    """Parts that weights and optimizer state are stored in; weights are put together layer by layer where they are
    used, and rows of the batch are split over these devices too."""
    tensor: AxisSize = 1
    """Parts of attention heads, feed-forward and vocabulary. It must divide the number of query heads, and divide or be
    a multiple of that of key/value heads: of fewer, each device has all. A vocabulary that does not divide is stored
    whole on each device."""
    context: AxisSize = 1
    """Parts of a row's tokens, for trajectories too long for one device. It must divide batch.row_lengths."""
    coordinator: str = ""
    """Where the processes of a run on several hosts meet: host:port of process 0, or auto for what Cloud TPU, SLURM,
    Kubernetes or JAX_COORDINATOR_ADDRESS say. Empty: one process (docs/many_hosts.md)."""
    processes: CountOrZero = 0
    """How many there are, one a host; 0 for what the environment says."""
    process_id: AxisSize = -1
    """Which one this is, from 0; -1 for what the environment says, so that all hosts can have the same config."""

    @property
    def sizes(self) -> dict[str, int]:
        """By axis."""
        return {
            "data": self.data,
            "fsdp": self.fsdp,
            "tensor": self.tensor,
            "context": self.context,
        }
