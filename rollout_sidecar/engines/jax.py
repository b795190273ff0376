"""The embedded engine: `tooljax.model.sampler` in this process, on CPU, TPU or GPU. The only part that imports JAX.

One worker thread owns the device. The event loop sends it commands through a queue and awaits futures; between two
commands the thread moves all running turns on by a few tokens. The same contexts, seeds and weights give the same
tokens and log-probs to the last bit, in whatever order requests come.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_sidecar.engines.base import (
    EMPTY,
    RELEASED,
    GenerateRequest,
    GenerateResult,
    WeightTensor,
)

if TYPE_CHECKING:  # JAX is imported when the engine starts
    from tooljax.model.sampler import Generated, Sampler, SamplerWeights

_log = logging.getLogger(__name__)

Command = Callable[[], None]


@dataclass
class _Swap:
    """Weights that wait until no turn is running."""

    weights: "SamplerWeights"
    policy_version: int
    done: "Future[None]"


class JaxEngine:
    """Serves the model in a Hugging Face folder. `dtype` is that of its weights: "float32" or "bfloat16"."""

    name = "jax"

    def __init__(self, model_path: str, *, dtype: str, slots: int, max_model_tokens: int):
        self.policy_version = 0
        self.max_model_tokens = max_model_tokens
        self.max_running = slots
        """Trajectories that it generates at once."""
        self.vocab_size = 0
        """Known once started."""
        self.fault = ""
        """Set by the worker thread."""
        self.swap_s: dict[str, float] = {}
        self._model_path, self._dtype, self._slots = model_path, dtype, slots
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped: BaseException | None = (
            None  # under the lock: why no command is taken any more
        )
        self._pending: set[Future[Any]] = (
            set()
        )  # under the lock: promised to callers and not yet kept
        # What follows belongs to the worker thread.
        self._sampler: Sampler
        self._turns: dict[str, Future[GenerateResult]] = {}
        self._swaps: list[_Swap] = []
        self._releases: list[Future[None]] = []
        self._released = False
        self._closing = False

    # --- the event loop's side ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the model and compiles all that generation will need."""
        started: Future[None] = Future()
        self._promise(started, lambda: started.set_result(None))
        self._thread = threading.Thread(target=self._work, name="jax-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(started)

    async def close(self) -> None:
        """Ends every turn as "aborted" and stops the thread. Also ends a start that is under way."""
        self._tell(self._close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one turn. Raises ValueError if the context leaves no room for a token."""
        future: Future[GenerateResult] = Future()
        self._promise(future, lambda: self._submit(request, future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await self.abort(request.trajectory_id)
            raise

    async def abort(self, trajectory_id: str) -> None:
        """Ends the trajectory's turn: its `generate` returns what there is."""
        self._tell(lambda: self._abort(trajectory_id))

    async def release(self, trajectory_id: str) -> None:
        """Gives the trajectory's slot to others."""
        self._tell(lambda: self._release(trajectory_id))

    async def load_weights(
        self,
        tensors: Mapping[str, WeightTensor],
        policy_version: int,
        changed: frozenset[str] | None = None,
    ) -> None:
        """Swaps all weights once the running turns have ended; turns that come meanwhile wait."""
        begun = time.monotonic()
        if self._released:
            raise ValueError(RELEASED)
        # Beside the worker thread, which samples on meanwhile.
        weights = await asyncio.to_thread(self._stage, tensors)
        staged = time.monotonic()
        future: Future[None] = Future()
        self._promise(future, lambda: self._queue_swap(_Swap(weights, policy_version, future)))
        await asyncio.wrap_future(future)
        self.swap_s = {"stage": staged - begun, "pause": time.monotonic() - staged}

    async def altered_tensors(self, tensors: Mapping[str, WeightTensor]) -> list[str]:
        """Compares the device's memory with the given bytes."""
        future: Future[list[str]] = Future()
        self._promise(future, lambda: future.set_result(self._altered(tensors)))
        return await asyncio.wrap_future(future)

    async def release_memory(self) -> None:
        """Drops weights and KV cache once the running turns have ended; turns that come meanwhile wait.

        JAX gives freed memory back to the device only with XLA_PYTHON_CLIENT_ALLOCATOR=platform.
        """
        future: Future[None] = Future()
        self._promise(future, lambda: self._stage_release(future))
        await asyncio.wrap_future(future)

    async def resume_memory(self) -> None:
        """Makes an empty KV cache; the weights come with the next push, and until then turns wait."""
        future: Future[None] = Future()
        self._promise(future, lambda: self._resume(future))
        await asyncio.wrap_future(future)

    def _promise(self, future: "Future[Any]", command: Command) -> None:
        """Sends a command that will settle `future`, and settles it otherwise if the thread ends first."""

        def run() -> None:
            # From here on the future cannot be cancelled, so settling it cannot fail.
            if not future.set_running_or_notify_cancel():
                return
            try:
                command()
            except ValueError as error:  # the caller's mistake: nobody else is concerned
                future.set_exception(error)

        with self._lock:
            if self._stopped is not None:
                raise RuntimeError(
                    f"the embedded engine has stopped: {self._stopped}"
                ) from self._stopped
            self._pending.add(future)
            self._commands.put(run)
        future.add_done_callback(self._forget)

    def _forget(self, future: "Future[Any]") -> None:
        with self._lock:
            self._pending.discard(future)

    def _tell(self, command: Command) -> None:
        """Sends a command without an answer; there is nothing to do for it once the thread has stopped."""
        self._commands.put(command)

    # --- the worker thread's side -------------------------------------------------------------------------------

    def _work(self) -> None:
        reason: BaseException = RuntimeError("it was closed")
        booted = False
        try:
            self._boot()
            booted = True
            while not self._closing:
                self._run_commands()
                self._swap_when_idle()
                self._release_when_idle()
                for generated in self._sampler.step():
                    self._deliver(generated)
        except BaseException as error:  # the boundary of the thread: whoever waits must hear of it
            # A model folder that cannot be used is the user's to mend: `start` raises the sentence that says how.
            if booted or not isinstance(error, (ValueError, OSError)):
                _log.exception("the embedded engine failed")
            reason = error
        with self._lock:
            self._stopped = reason
            pending = list(self._pending)
        for future in pending:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(reason)

    def _boot(self) -> None:
        """Imports JAX, loads the model, compiles."""
        from tooljax.model import hf
        from tooljax.model.sampler import Sampler, unstack

        begun = time.monotonic()
        decoder = hf.load(self._model_path, self._dtype)  # pyright: ignore[reportArgumentType]
        loaded = time.monotonic()
        self._sampler = Sampler(
            decoder.cfg,
            unstack(decoder),
            slots=self._slots,
            max_model_tokens=self.max_model_tokens,
        )
        self._sampler.warm_up()
        self.vocab_size = decoder.cfg.vocab
        compiled = time.monotonic()
        _log.info("loaded in %.1f s, compiled in %.1f s", loaded - begun, compiled - loaded)

    def _run_commands(self) -> None:
        """Runs the commands that have come; with nothing else to do, waits for one."""
        idle = not (self._sampler.busy or self._swaps or self._releases)
        while not self._closing:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            command()
            idle = False

    def _submit(self, request: GenerateRequest, future: "Future[GenerateResult]") -> None:
        from tooljax.model.sampler import Generation

        self._sampler.submit(
            Generation(
                trajectory_id=request.trajectory_id,
                token_ids=request.token_ids,
                max_tokens=request.max_tokens,
                seed=request.seed,
                stop_ids=request.stop_ids,
                temperature=request.sampling.temperature,
                top_k=request.sampling.top_k,
                top_p=request.sampling.top_p,
            )
        )
        self._turns[request.trajectory_id] = future

    def _deliver(self, generated: "Generated") -> None:
        future = self._turns.pop(generated.trajectory_id)
        if not all(map(math.isfinite, generated.log_probs)):
            message = (
                f"log-probs are not finite: weights {self.policy_version} hold or give inf or NaN"
            )
            future.set_exception(RuntimeError(message))
            return
        future.set_result(
            GenerateResult(
                token_ids=generated.token_ids,
                log_probs=generated.log_probs,
                finish=generated.finish,
                policy_version=self.policy_version,
                cached_tokens=generated.cached_tokens,
            )
        )

    def _abort(self, trajectory_id: str) -> None:
        if (generated := self._sampler.abort(trajectory_id)) is not None:
            self._deliver(generated)

    def _release(self, trajectory_id: str) -> None:
        self._abort(trajectory_id)
        self._sampler.release(trajectory_id)

    def _close(self) -> None:
        for trajectory_id in list(self._turns):
            self._abort(trajectory_id)
        self._closing = True

    def _stage(self, tensors: Mapping[str, WeightTensor]) -> "SamplerWeights":
        """Copies the tensors to the device, or raises ValueError."""
        import jax

        from tooljax.model import hf

        arrays = {name: _array(tensor) for name, tensor in tensors.items()}
        return jax.block_until_ready(hf.from_hf_layers(self._sampler.cfg, arrays))

    def _queue_swap(self, swap: _Swap) -> None:
        """No turn starts until the weights are in."""
        if self._released:
            raise ValueError(RELEASED)
        self._swaps.append(swap)
        self._sampler.paused = True

    def _swap_when_idle(self) -> None:
        if not self._swaps or self._sampler.running:
            return
        for swap in self._swaps:
            self._sampler.replace_weights(swap.weights)
            self.policy_version = swap.policy_version
            self.fault = ""  # before anybody hears of it
            swap.done.set_result(None)
        self._swaps = []
        self._sampler.paused = False

    def _stage_release(self, done: "Future[None]") -> None:
        self._sampler.paused = True
        self._releases.append(done)

    def _release_when_idle(self) -> None:
        if not self._releases or self._sampler.running:
            return
        if not self._released:
            self._sampler.drop_memory()
            self._released, self.fault = True, RELEASED
        for done in self._releases:
            done.set_result(None)
        self._releases = []

    def _resume(self, done: "Future[None]") -> None:
        if self._released:
            self._sampler.restore_memory()
            self._released, self.fault = False, EMPTY
        done.set_result(None)

    def _altered(self, tensors: Mapping[str, WeightTensor]) -> list[str]:
        from tooljax.model import hf

        if self._released:
            raise ValueError(RELEASED)
        held = hf.layers_to_hf(self._sampler.cfg, self._sampler.weights)
        return [n for n, array in held if array.tobytes() != bytes(tensors[n].data)]


def _array(tensor: WeightTensor) -> np.ndarray:
    """The tensor's bytes as an array. NumPy knows bfloat16 because JAX has been imported."""
    dtype = np.dtype(tensor.dtype)
    wanted = math.prod(tensor.shape) * dtype.itemsize
    if tensor.data.nbytes != wanted:
        raise ValueError(
            f"tensor {tensor.name} has {tensor.data.nbytes} bytes; {tensor.dtype} {[*tensor.shape]} takes {wanted}"
        )
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
