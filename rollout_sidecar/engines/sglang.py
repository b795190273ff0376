"""SGLang behind the sidecar: `sglang.Engine` in this process, its schedulers in their own. The only import of torch.

Weights are swapped between tokens: running generations are taken out of the engine with what they have sampled, the
weights replaced, every cached prefix of the old version dropped, and the generations go on from the same tokens. What
a turn sampled under which version is therefore known exactly, whatever SGLang itself reports.

Traps that this file is built around (SGLang 0.5.17 to 0.5.23): an update that flushes the cache by itself kills the
engine when a request has just ended, so flushing is asked for separately; aborting matches request ids by prefix, so
ids have a fixed width; seeds are read in deterministic mode only; the weight version it reports is the one at delivery.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollout_sidecar.engines import sglang_memory
from rollout_sidecar.engines.base import GenerateRequest, GenerateResult, Staging, WeightTensor
from rollout_sidecar.engines.hf_tensors import check_tensors, read_model_config, tensor_shapes
from rollout_sidecar.engines.sglang_answers import Answers, EngineEnded
from rollout_sidecar.engines.sglang_metrics import metrics_text
from rollout_sidecar.engines.sglang_process import SglangProcesses, end_this_process
from rollout_sidecar.engines.sglang_sampling import Part, joined, read_output, request_arguments
from rollout_sidecar.engines.sglang_setup import (
    SglangOptions,
    all_answers,
    check_version,
    engine_arguments,
    require_success,
    sglang_module,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

IO = "srt.managers.io_struct"
"""SGLang's module of requests."""

FLUSH_TIMEOUT_S = 5.0
"""How long SGLang may take to see that it is idle."""

ABORT_TIMEOUT_S = 2.0
"""After this, generations that did not end when asked are asked again, all together."""

CLOSE_TIMEOUT_S = 5.0
"""How long a generation may take to end before its processes are."""


@dataclass
class _Turn:
    """One `generate` that is under way."""

    request_id: str = ""
    """Of the part that is in the engine now; "" between parts."""
    interrupted: bool = False
    """Taken out of the engine for a swap: it goes on afterwards."""
    aborted: bool = False
    """Asked to end."""


class SglangEngine:
    """Serves the model in a Hugging Face folder."""

    name = "sglang"

    def __init__(
        self,
        model_path: str,
        *,
        max_model_tokens: int,
        options: SglangOptions | None = None,
        on_failure: Callable[[str], object] = end_this_process,
    ):
        """Reads the model's config and tensor shapes; nothing of SGLang is imported before `start`.

        Args:
            on_failure: is told when a process of SGLang ends by itself, after every generation has failed. The engine
                does not come back.
        """
        self.policy_version = 0
        self.max_model_tokens = max_model_tokens
        self.options = options or SglangOptions()
        self.max_running = self.options.max_running
        """Trajectories that it generates at once."""
        self.vocab_size = int(read_model_config(Path(model_path))["vocab_size"])
        self._shapes = tensor_shapes(Path(model_path))
        self._model_path = model_path
        self._on_failure = on_failure
        self._processes = SglangProcesses(self._failed)
        self._tokenizer_manager: Any = None
        self._turns: dict[str, _Turn] = {}
        self._in_engine = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._answers = Answers()
        self.fault = "it has not been started"
        """Why nothing can be generated; "" when it can."""
        self.swap_s: dict[str, float] = {}
        self._staging: Any = None
        """Buckets that the next load_weights may use."""

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts SGLang's processes and serves one probe. ValueError says in a sentence why they did not start."""
        check_version(any_version=self.options.any_version)
        begun = time.monotonic()
        arguments = engine_arguments(self._model_path, self.max_model_tokens, self.options)
        self._tokenizer_manager = await self._processes.start(arguments)
        self.fault = ""
        self._open.set()
        await self._probe()
        _log.info("SGLang is up after %.1f s", time.monotonic() - begun)

    async def close(self) -> None:
        """Ends every generation as "aborted", then SGLang's processes."""
        for trajectory_id in list(self._turns):
            await self.abort(trajectory_id)
        self.fault = "it was closed"
        self._open.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CLOSE_TIMEOUT_S)
        self._answers.end()
        self._tokenizer_manager = None
        await self._processes.close()

    def metrics_text(self) -> str:
        """SGLang's own metrics as Prometheus text, under its names. May take a while: it reads files."""
        return "" if self._tokenizer_manager is None else metrics_text()

    def log_lines(self) -> list[str]:
        """The last lines that SGLang's processes wrote to stderr."""
        return self._processes.log.lines()

    def _failed(self, reason: str) -> None:
        self.fault = reason
        self._open.set()
        self._answers.end()
        self._on_failure(reason)

    # --- generation ---------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one turn, in as many parts as weights are swapped meanwhile."""
        turn = self._turns[request.trajectory_id] = _Turn()
        parts: list[tuple[int, Part]] = []
        finish = "aborted"
        try:
            while not turn.aborted:
                await self._open.wait()
                if turn.aborted:
                    break
                self._require_sound()
                turn.interrupted = False
                version = self.policy_version
                sampled = [token_id for _, part in parts for token_id in part.token_ids]
                part = await self._sample(turn, request, sampled)
                parts.append((version, part))
                if part.finish != "abort":
                    finish = part.finish
                    break
                if not (turn.interrupted or turn.aborted):
                    raise RuntimeError("SGLang ended a generation that nobody had asked it to end")
        except EngineEnded:
            if not turn.aborted:
                raise
        finally:
            del self._turns[request.trajectory_id]
        return joined(parts, finish, self.policy_version)

    async def _sample(self, turn: _Turn, request: GenerateRequest, sampled: list[int]) -> Part:
        """One request to SGLang, from the context and what has been sampled of this turn so far."""
        arguments = request_arguments(request, sampled, deterministic=self.options.deterministic)
        turn.request_id = uuid.uuid4().hex  # of fixed width: SGLang aborts by prefix
        self._enter()
        try:
            # A namespace of the prefix cache: no version reads another's keys and values.
            key = f"version {self.policy_version}"
            output = await self._ask(rid=turn.request_id, extra_key=key, **arguments)
        except asyncio.CancelledError:
            if self._tokenizer_manager is not None:
                self._manager.abort_request(turn.request_id)
            raise
        except Exception as error:
            if type(error).__name__ == "RequestAbortedError":  # before it reached the scheduler
                return Part([], [], "abort", 0)
            raise
        finally:
            turn.request_id = ""
            self._leave()
        return read_output(output, request.stop_ids)

    async def _ask(self, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns its one answer. Read to its end: SGLang holds a lock until then."""
        request = sglang_module(IO).GenerateReqInput(**arguments)
        answers = self._manager.generate_request(request, None)
        return (await self._answer(all_answers(answers)))[-1]

    async def abort(self, trajectory_id: str) -> None:
        """Ends the trajectory's running generation, which returns what it has."""
        turn = self._turns.get(trajectory_id)
        if turn is not None:
            turn.aborted = True
            if turn.request_id:
                self._manager.abort_request(turn.request_id)

    async def release(self, trajectory_id: str) -> None:
        """SGLang's prefix cache evicts by itself; only a generation that still runs is ended."""
        await self.abort(trajectory_id)

    # --- weights ------------------------------------------------------------------------------------------------

    async def load_weights(
        self,
        tensors: Mapping[str, WeightTensor],
        policy_version: int,
        changed: frozenset[str] | None = None,
    ) -> None:
        """Replaces the weights between two tokens of every running generation; forgets every cached prefix and serves a
        probe before anything goes on.

        Raises ValueError, with nothing changed, if a tensor does not fit the model. RuntimeError if SGLang fails half
        way: then nothing is generated any more until a later push has gone through.
        """
        from rollout_sidecar.engines.sglang_weights import finish

        staging, self._staging = self._staging, None
        if self.fault == sglang_memory.RELEASED:
            raise ValueError(self.fault)
        check_tensors(tensors, self._shapes)
        if changed is not None and not self.fault:
            tensors = {name: tensors[name] for name in tensors if name in changed}
        begun = time.monotonic()
        size, device = self.options.bucket_bytes, self._device
        buckets = await asyncio.to_thread(finish, staging, tensors, policy_version, size, device)
        staged = time.monotonic()
        self._open.clear()
        try:
            await self._empty()
            emptied = time.monotonic()
            self.fault = f"the swap to version {policy_version} failed half way; push again"
            async with self._weight_update():
                for bucket in buckets:
                    await self._hand_over(bucket)
            loaded = time.monotonic()
            await self._forget_prefixes()
            flushed = time.monotonic()
            self.policy_version = policy_version
            self.fault = ""
            # Before anything else: afterwards it would wait until all contexts have been read again.
            await self._probe()
        finally:
            resumed = time.monotonic()
            self._open.set()
        self.swap_s = {
            "stage": staged - begun,
            "pause": resumed - staged,
            "pause_empty": emptied - staged,
            "pause_load": loaded - emptied,
            "pause_flush": flushed - loaded,
            "pause_probe": resumed - flushed,
        }

    def begin_staging(self, tensors: Sequence[WeightTensor], policy_version: int) -> Staging | None:
        """As Staging says. None while everything must be loaded, changed or not."""
        from rollout_sidecar.engines.sglang_weights import Buckets

        size, device = self.options.bucket_bytes, self._device
        self._staging = None if self.fault else Buckets(tensors, policy_version, size, device)
        return self._staging

    async def altered_tensors(self, tensors: Mapping[str, WeightTensor]) -> list[str] | None:
        """Compares hashes; None with more than one GPU, or where SGLang keeps weights in a form of its own."""
        return await self._answer(
            sglang_memory.altered(self._manager, tensors, self.options.dtype, self._device)
        )

    async def release_memory(self) -> None:
        """Takes running generations out first: they wait with what they have sampled."""
        sglang_memory.check_can_release(self.options)
        if self.fault == sglang_memory.RELEASED:
            return
        self._open.clear()
        try:
            await self._empty()
            await self._forget_prefixes()
            await self._answer(sglang_memory.release(self._manager))
        except BaseException:
            self._open.set()
            raise
        self.fault = sglang_memory.RELEASED

    async def resume_memory(self) -> None:
        """Generations still wait, for the weights."""
        if self.fault == sglang_memory.RELEASED:
            await self._answer(sglang_memory.resume(self._manager))
            self.fault = sglang_memory.EMPTY

    async def _empty(self) -> None:
        """Takes every generation out of the engine; what it has sampled stays with its turn."""
        for turn in self._turns.values():
            if turn.request_id:
                turn.interrupted = True
                self._manager.abort_request(turn.request_id)
        while not self._idle.is_set():
            try:
                await asyncio.wait_for(self._idle.wait(), ABORT_TIMEOUT_S)
            except TimeoutError:
                self._require_sound()
                self._manager.abort_request(abort_all=True)

    @asynccontextmanager
    async def _weight_update(self) -> AsyncIterator[None]:
        """What newer releases want around updates; older ones do not know it."""
        manager, io = self._manager, sglang_module(IO)
        if not hasattr(manager, "begin_weight_update"):
            yield
            return
        begin, end = io.BeginWeightUpdateReqInput(), io.EndWeightUpdateReqInput()
        require_success(await self._answer(manager.begin_weight_update(begin, None)))
        try:
            yield
        finally:
            require_success(await self._answer(manager.end_weight_update(end, None)))

    async def _hand_over(self, bucket: bytes) -> None:
        update = sglang_module(IO).UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[bucket] * self.options.tensor_parallel,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        require_success(await self._answer(self._manager.update_weights_from_tensor(update, None)))

    async def _forget_prefixes(self) -> None:
        answer = await self._answer(self._manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
        if not answer.success:
            raise RuntimeError(
                f"SGLang did not drop its prefix cache within {FLUSH_TIMEOUT_S:g} s: "
                f"{getattr(answer, 'message', '')}"
            )

    async def _probe(self) -> None:
        """One greedy token: the engine answers, and its weights give finite log-probs."""
        output = await self._ask(
            rid=uuid.uuid4().hex,
            input_ids=[0, min(1, self.vocab_size - 1)],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            extra_key="probe",
        )
        log_prob = output["meta_info"]["output_token_logprobs"][0][0]
        if log_prob is None or not math.isfinite(log_prob):
            self.fault = (
                f"weights {self.policy_version} give the log-prob {log_prob}; push finite ones"
            )
            raise RuntimeError(self.fault)

    # --- small parts --------------------------------------------------------------------------------------------

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager: what its HTTP server itself talks to."""
        if self._tokenizer_manager is None:
            raise RuntimeError(f"SGLang cannot be asked: {self.fault}")
        return self._tokenizer_manager

    @property
    def _device(self) -> str:
        on_cpu = self.options.extra.get("device") == "cpu" or self.options.tensor_parallel > 1
        return "cpu" if on_cpu else f"cuda:{self.options.first_gpu}"

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """What SGLang answers. EngineEnded if its processes end first."""
        return await self._answers.to(call, lambda: self.fault)

    def _require_sound(self) -> None:
        if self.fault:
            raise RuntimeError(f"SGLang cannot generate: {self.fault}")

    def _enter(self) -> None:
        self._in_engine += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._in_engine -= 1
        if not self._in_engine:
            self._idle.set()
