"""Generation with a KV cache: many trajectories at once in a fixed number of slots.

`submit` queues a turn, `step` moves every running turn on and returns those that ended. A trajectory keeps its slot
from its first turn until `release`, so its next turn reads only what is new. Nothing is compiled after `warm_up`.

The tokens and log-probs of a trajectory are a function of its own contexts, seeds and the weights, to the last bit:
- decoding always computes all slots in one fixed shape, whose rows do not influence each other;
- a context is read in chunks whose sizes depend on its own length alone;
- a prompt is copied from another slot only if that slot read the same tokens from position 0, in the same chunks.

One thread at a time may use a Sampler. What it does not do: share prefixes other than whole prompts, or page the cache.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tooljax.model.decoder import DecoderConfig
from tooljax.model.kv_cache import KEY_CHUNK, empty_cache
from tooljax.model.sampler_slots import Generated, Generation, Slot, SlotRows, Turn
from tooljax.model.sampler_steps import (
    MAX_STEPS,
    MAX_STOP_IDS,
    Chunks,
    Copies,
    SamplerWeights,
    compilations,
    decode,
    prefill,
    share,
    unstack,
)
from tooljax.model.sampling import split_seed

__all__ = ["Generated", "Generation", "Sampler", "SamplerWeights", "unstack"]

CHUNK_SIZES = (256, 64, 16)
"""Tokens that one prefill chunk can hold. Part of the numerics, like KEY_CHUNK."""

_CHUNK_TOKENS = 2048  # of one prefill dispatch, so that decoding is never held up for long
_MAX_COPIES = 256


class Sampler:
    """Continuous batching over `slots` contexts of up to max_model_tokens tokens each."""

    def __init__(
        self,
        cfg: DecoderConfig,
        weights: SamplerWeights,
        *,
        slots: int,
        max_model_tokens: int,
        block_steps: int = 8,
        share_prompts: bool = True,
    ):
        """block_steps is how many tokens a slot gets before the host looks again: at most 16. It, share_prompts and
        the order of calls change the speed, and no result.
        """
        if not 1 <= block_steps <= MAX_STEPS:
            raise ValueError(f"block_steps={block_steps} must be from 1 to {MAX_STEPS}")
        self.cfg = cfg
        self.max_model_tokens = max_model_tokens
        self.paused = False
        """While True no turn starts; those running go on."""
        self._block_steps = block_steps
        self._share_prompts = share_prompts
        self._device = jax.local_devices()[0]
        self._weights = jax.device_put(weights, self._device)
        self._slots = [Slot(index) for index in range(slots)]
        self._cache = self._empty_cache()
        self._free = deque(self._slots)
        self._slot_of: dict[str, Slot] = {}
        self._waiting: dict[str, Turn] = {}
        self._running: dict[str, Slot] = {}
        self._rows = SlotRows(slots)

    # --- turns --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Turns that have started and not ended."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._running) or (not self.paused and self._next_to_start() is not None)

    def submit(self, generation: Generation) -> None:
        """Queues a turn: it starts when its trajectory has a slot. Slots are given first come, first served."""
        tokens, limit = generation.token_ids, self.max_model_tokens
        name = generation.trajectory_id
        if name in self._waiting or name in self._running:
            raise ValueError(
                f"trajectory {name!r} is already generating a turn; wait for it, or abort it"
            )
        if not 0 < len(tokens) < limit:
            raise ValueError(
                f"context of {len(tokens)} tokens: the engine takes 1 to {limit - 1}, so that one more fits "
                f"into max_model_tokens={limit}"
            )
        if not 0 <= min(tokens) <= max(tokens) < self.cfg.vocab:
            raise ValueError(
                f"token ids {min(tokens)} to {max(tokens)} are not all in the vocabulary of {self.cfg.vocab}"
            )
        if generation.max_tokens < 1:
            raise ValueError(f"max_tokens={generation.max_tokens} must be at least 1")
        if len(generation.stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"{len(generation.stop_ids)} stop ids; the embedded engine takes up to {MAX_STOP_IDS}"
            )
        split_seed(generation.seed)
        self._waiting[name] = Turn(generation, min(generation.max_tokens, limit - len(tokens)))

    def step(self) -> list[Generated]:
        """Starts what can start, reads waiting contexts, samples a few tokens a slot; returns the turns that ended."""
        while not self.paused and (name := self._next_to_start()) is not None:
            self._start(name)
        self._read_contexts()
        return self._sample()

    def abort(self, trajectory_id: str) -> Generated | None:
        """Ends the trajectory's turn with what it has; None if it has none. The slot stays the trajectory's."""
        if trajectory_id in self._waiting:
            return self._waiting.pop(trajectory_id).generated("aborted")
        slot = self._running.pop(trajectory_id, None)
        if slot is None or slot.turn is None:
            return None
        generated = slot.turn.generated("aborted")
        slot.turn = None
        return generated

    def release(self, trajectory_id: str) -> None:
        """Gives the trajectory's slot to others. No-op if unknown; a turn still running is dropped."""
        self.abort(trajectory_id)
        slot = self._slot_of.pop(trajectory_id, None)
        if slot is not None:
            slot.owner = None
            self._free.append(slot)

    def _next_to_start(self) -> str | None:
        """The first waiting trajectory that has a slot, or could get one."""
        if self._free:
            return next(iter(self._waiting), None)
        return next((name for name in self._waiting if name in self._slot_of), None)

    def _start(self, name: str) -> None:
        turn = self._waiting.pop(name)
        slot = self._slot_of.get(name)
        if slot is None:
            slot = self._free.popleft()
            slot.owner, slot.held, slot.prompt = name, [], None
            self._slot_of[name] = slot
        context = turn.generation.token_ids
        turn.cached_tokens = _common_prefix(slot.held, context[:-1])
        del slot.held[turn.cached_tokens :]
        if slot.prompt is not None and len(slot.prompt) > len(slot.held):
            slot.prompt = None
        slot.turn, slot.from_zero = turn, not slot.held
        self._running[name] = slot
        self._rows.set_turn(slot.index, turn.generation)

    # --- weights and compilation --------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles everything that `step` can need."""
        for size in CHUNK_SIZES:
            self._prefill(size, [])
        self._copy_chunks([])
        self._cache, sampled = decode(
            self.cfg, self._weights, self._cache, self._rows.arguments(), np.array(0, np.int32)
        )
        jax.block_until_ready(sampled)

    @property
    def compilations(self) -> int:
        """Programs compiled in this process. It does not grow after `warm_up`."""
        return compilations()

    def replace_weights(self, weights: SamplerWeights) -> None:
        """Takes new weights and forgets all that was computed with the old. No turn may be running."""
        if self._running:
            raise RuntimeError(f"{self.running} turns are running; pause, and step until none is")
        old, new = (jax.tree.map(_kind, tree) for tree in (self._weights, weights))
        if old != new:
            raise ValueError("the new weights differ from the model in a name, shape or dtype")
        self._weights = jax.device_put(weights, self._device)
        for slot in self._slots:
            slot.held, slot.prompt = [], None

    @property
    def weights(self) -> SamplerWeights:
        """What it samples with, on the device."""
        return self._weights

    def drop_memory(self) -> None:
        """Frees weights and cache. No turn may be running, and none may start before both are there again."""
        if self._running:
            raise RuntimeError(f"{self.running} turns are running; pause, and step until none is")
        for array in jax.tree.leaves((self._cache, self._weights)):
            array.delete()
        self._cache = None
        # What is left says which weights fit.
        self._weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._weights
        )

    def restore_memory(self) -> None:
        """An empty cache again, and no weights: `replace_weights` brings them."""
        self._cache = self._empty_cache()
        for slot in self._slots:
            slot.held, slot.prompt = [], None

    def _empty_cache(self) -> Any:
        # The last chunk of a context may be padded by just under half of the largest size, and one position more
        # takes the writes of idle slots.
        cache = empty_cache(self.cfg, len(self._slots), self.max_model_tokens + CHUNK_SIZES[0] // 2)
        return jax.device_put(cache, self._device)

    # --- one step -----------------------------------------------------------------------------------------------

    def _read_contexts(self) -> None:
        """Prefills up to one dispatch of each chunk size, then copies prompts to the slots that wait for them."""
        unread = [slot for slot in self._running.values() if slot.unread]
        if not unread:
            return
        readers, copiers = self._divide(unread)
        for size in CHUNK_SIZES:
            room = _CHUNK_TOKENS // size
            chunks: list[tuple[Slot, int]] = []
            for slot in readers:
                while len(chunks) < room and slot.unread and _chunk_size(slot.unread) == size:
                    chunks.append((slot, len(slot.held)))
                    context, start = slot.running.generation.token_ids, len(slot.held)
                    slot.held.extend(context[start : min(start + size, len(context) - 1)])
            if chunks:
                self._prefill(size, chunks)
        for slot in readers:
            if not slot.unread and slot.from_zero:
                slot.prompt = tuple(slot.held)
        copies = [(self._holder(slot), slot) for slot in copiers]
        self._copy([(source, target) for source, target in copies if source is not None])

    def _divide(self, unread: list[Slot]) -> tuple[list[Slot], list[Slot]]:
        """Slots that must read their context, and slots that can copy it from another, now or when that has read it."""
        readers, copiers, reading = [], [], set()
        for slot in unread:
            prompt = tuple(slot.running.generation.token_ids[:-1])
            untouched = self._share_prompts and slot.from_zero and not slot.held
            if untouched and (prompt in reading or self._holder(slot) is not None):
                copiers.append(slot)
            else:
                readers.append(slot)
                if slot.from_zero:
                    reading.add(prompt)
        return readers, copiers

    def _holder(self, slot: Slot) -> Slot | None:
        """A slot that holds the whole context of `slot`, read from position 0."""
        prompt = tuple(slot.running.generation.token_ids[:-1])
        return next((other for other in self._slots if other.prompt == prompt), None)

    def _prefill(self, size: int, chunks: list[tuple[Slot, int]]) -> None:
        """Reads, for each (slot, start), what its context has from position `start` on, up to `size` tokens."""
        room = _CHUNK_TOKENS // size
        tokens = np.zeros((room, size), np.int32)
        slots, starts = np.zeros(room, np.int32), np.zeros(room, np.int32)
        for row, (slot, start) in enumerate(chunks):
            context = slot.running.generation.token_ids
            new = context[start : min(start + size, len(context) - 1)]
            tokens[row, : len(new)] = new
            slots[row], starts[row] = slot.index, start
        count = np.array(len(chunks), np.int32)
        self._cache = prefill(
            self.cfg, self._weights, self._cache, Chunks(tokens, slots, starts, count)
        )

    def _copy(self, pairs: list[tuple[Slot, Slot]]) -> None:
        """Gives each target the prompt of its source."""
        entries = [
            (source.index, target.index, start)
            for source, target in pairs
            for start in range(0, len(source.prompt or ()), KEY_CHUNK)
        ]
        for first in range(0, len(entries), _MAX_COPIES):
            self._copy_chunks(entries[first : first + _MAX_COPIES])
        for source, target in pairs:
            target.prompt, target.held = source.prompt, list(source.prompt or ())

    def _copy_chunks(self, entries: list[tuple[int, int, int]]) -> None:
        table = np.zeros((3, _MAX_COPIES), np.int32)
        table[:, : len(entries)] = np.array(entries, np.int32).reshape(-1, 3).T
        sources, targets, starts = table
        self._cache = share(
            self._cache, Copies(sources, targets, starts, np.array(len(entries), np.int32))
        )

    def _sample(self) -> list[Generated]:
        """One block of decoding in every slot whose context is read."""
        ready = [slot for slot in self._running.values() if not slot.unread]
        if not ready:
            return []
        for slot in ready:
            turn = slot.running
            last = turn.sampled[-1] if turn.sampled else turn.generation.token_ids[-1]
            self._rows.set_next(slot.index, last, len(slot.held), turn.budget - len(turn.sampled))
        steps = np.array(self._block_steps, np.int32)
        self._cache, sampled = decode(
            self.cfg, self._weights, self._cache, self._rows.arguments(), steps
        )
        sampled = jax.device_get(sampled)
        self._rows.budgets[:] = 0
        ended = []
        for slot in ready:
            count = sampled.counts[slot.index]
            tokens = sampled.tokens[:count, slot.index].tolist()
            log_probs = sampled.log_probs[:count, slot.index].tolist()
            if (generated := self._take(slot, tokens, log_probs)) is not None:
                ended.append(generated)
        return ended

    def _take(self, slot: Slot, tokens: list[int], log_probs: list[float]) -> Generated | None:
        """Adds what a block sampled to the slot's turn; returns the turn if that ended it."""
        turn = slot.running
        context = turn.generation.token_ids
        # Held now: what was fed, that is all but the last token sampled.
        slot.held.append(turn.sampled[-1] if turn.sampled else context[-1])
        slot.held.extend(tokens[:-1])
        turn.sampled.extend(tokens)
        turn.log_probs.extend(log_probs)
        stopped = turn.sampled[-1] in turn.generation.stop_ids
        if not stopped and len(turn.sampled) < turn.budget:
            return None
        del self._running[turn.generation.trajectory_id]
        slot.turn = None
        return turn.generated("stop" if stopped else "length")


def _kind(array: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], str]:
    return array.shape, str(array.dtype)


def _chunk_size(unread: int) -> int:
    """The size of the next chunk of a context: at least half of it is used, unless it is the smallest."""
    return next(size for size in CHUNK_SIZES if unread > size // 2 or size == CHUNK_SIZES[-1])


def _common_prefix(held: Sequence[int], context: Sequence[int]) -> int:
    """How many leading tokens the two share."""
    pairs = enumerate(zip(held, context, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(held), len(context)))
