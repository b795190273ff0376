"""The host's books on the sampler's slots: which tokens each holds, whose they are, and how its turn samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tooljax.model.sampler_steps import MAX_STOP_IDS, DecodeRows
from tooljax.model.sampling import SamplingRows, split_seed


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A turn to generate: the whole context, and how to go on from it."""

    trajectory_id: str
    token_ids: Sequence[int]
    max_tokens: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What a turn came to. With finish "stop", the stop id is the last token."""

    trajectory_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length", "aborted"]
    cached_tokens: int
    """Context tokens kept from the trajectory's own earlier turns."""


@dataclass
class Turn:
    """A running turn."""

    generation: Generation
    budget: int
    cached_tokens: int = 0
    sampled: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def generated(self, finish: Literal["stop", "length", "aborted"]) -> Generated:
        return Generated(
            trajectory_id=self.generation.trajectory_id,
            token_ids=self.sampled,
            log_probs=self.log_probs,
            finish=finish,
            cached_tokens=self.cached_tokens,
        )


@dataclass
class Slot:
    """One row of the cache: which tokens it holds, and for whom."""

    index: int
    owner: str | None = None
    held: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the cache, from position 0 on."""
    turn: Turn | None = None
    prompt: tuple[int, ...] | None = None
    """A prefix of `held` that was read from position 0 in one go: others may copy it."""
    from_zero: bool = False
    """The running turn found nothing held, so what it reads will be such a prefix."""

    @property
    def running(self) -> Turn:
        """The turn, where there must be one."""
        assert self.turn is not None, f"slot {self.index} runs no turn"
        return self.turn

    @property
    def unread(self) -> int:
        """Context tokens still to prefill: all but the last, which decoding feeds."""
        if self.turn is None:
            return 0
        return max(0, len(self.turn.generation.token_ids) - 1 - len(self.held))


class SlotRows:
    """The host's copy of what `decode` needs to know of every slot."""

    def __init__(self, slots: int):
        self.tokens = np.zeros(slots, np.int32)
        self.positions = np.zeros(slots, np.int32)
        self.budgets = np.zeros(slots, np.int32)
        self.stop_ids = np.full((slots, MAX_STOP_IDS), -1, np.int32)
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.seeds = np.zeros((slots, 2), np.uint32)

    def set_turn(self, slot: int, generation: Generation) -> None:
        """How a turn samples and stops."""
        stop_ids = sorted(generation.stop_ids)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.temperature[slot] = generation.temperature
        self.top_k[slot] = min(generation.top_k, np.iinfo(np.int32).max)
        self.top_p[slot] = generation.top_p
        self.seeds[slot] = split_seed(generation.seed)

    def set_next(self, slot: int, token: int, position: int, budget: int) -> None:
        """What the slot feeds in the next block, and how much it may sample."""
        self.tokens[slot], self.positions[slot], self.budgets[slot] = token, position, budget

    def arguments(self) -> DecodeRows:
        """What `decode` takes. Only rows in use may ask for the sort that top-k and top-p need."""
        used = self.budgets > 0
        top_k, top_p = np.where(used, self.top_k, 0), np.where(used, self.top_p, np.float32(1))
        sampling = SamplingRows(self.temperature, top_k, top_p, self.seeds)
        return DecodeRows(self.tokens, self.positions, self.budgets, self.stop_ids, sampling)
