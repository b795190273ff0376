"""The contract of verl's samplers, for users' files that import it: which rows come next, and what came of them.

As in verl up to 0.7.1, but for the base class: verl's is torch's Sampler, whose only promise is to be iterable.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any


class AbstractSampler(ABC):
    """Gives the numbers of rows in the order in which they are to be taken, pass after pass."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any):
        """`data_source`: the rows, by number. `data_config`: verl's data section, by name."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """One pass; it is asked for the next one when this ends."""


class AbstractCurriculumSampler(AbstractSampler):
    """One whose order depends on what came of the rows before."""

    @abstractmethod
    def update(self, batch: "DataProto") -> None:
        """Called once a step, before the next rows are taken."""


@dataclass
class DataProto:
    """A step's trajectories: what verl's class of this name holds, as far as samplers read it."""

    batch: dict[str, Any] = field(default_factory=dict)
    """Arrays, a row a trajectory."""
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    """NumPy arrays of objects, an entry a trajectory."""
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Trajectories."""
        return next((len(v) for v in (*self.batch.values(), *self.non_tensor_batch.values())), 0)
