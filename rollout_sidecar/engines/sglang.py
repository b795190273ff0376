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
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_sidecar.engines.base import GenerateRequest, GenerateResult, WeightTensor
from rollout_sidecar.engines.hf_tensors import check_tensors, read_model_config, tensor_shapes
from rollout_sidecar.engines.sglang_setup import (
    SglangOptions,
    check_version,
    engine_arguments,
    make_engine,
    sglang_module,
)
from rollout_sidecar.protocol import VersionSpan

_log = logging.getLogger(__name__)

IO = "srt.managers.io_struct"
"""SGLang's module of requests."""

FLUSH_TIMEOUT_S = 5.0
"""How long SGLang may take to see that it is idle."""


@dataclass
class _Turn:
    """One `generate` that is under way."""

    request_id: str = ""
    """Of the part that is in the engine now; "" between parts."""
    interrupted: bool = False
    """Taken out of the engine for a swap: it goes on afterwards."""
    aborted: bool = False
    """Asked to end."""


@dataclass
class _Part:
    """What one request to SGLang sampled."""

    token_ids: list[int]
    log_probs: list[float]
    finish: str
    """stop, length or abort."""
    cached_tokens: int


class SglangEngine:
    """Serves the model in a Hugging Face folder."""

    name = "sglang"

    def __init__(
        self, model_path: str, *, max_model_tokens: int, options: SglangOptions | None = None
    ):
        """Reads the model's config and tensor shapes; nothing of SGLang is imported before `start`."""
        self.policy_version = 0
        self.max_model_tokens = max_model_tokens
        self.options = options or SglangOptions()
        self.vocab_size = int(read_model_config(Path(model_path))["vocab_size"])
        self._shapes = tensor_shapes(Path(model_path))
        self._model_path = model_path
        self._engine: Any = None
        self._turns: dict[str, _Turn] = {}
        self._in_engine = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._fault = "it has not been started"
        """Why nothing can be generated; "" when it can."""
        self.pause_s = 0.0
        """How long the last swap held generation up."""

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts SGLang's processes and serves one probe."""
        check_version(any_version=self.options.any_version)
        begun = time.monotonic()
        # Off the loop, so that /healthz answers; SGLang then leaves signals alone, and its child processes ask for
        # this one's end with SIGQUIT when they fail.
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._scheduler_died)
        self._engine = await asyncio.to_thread(
            make_engine, engine_arguments(self._model_path, self.max_model_tokens, self.options)
        )
        self._fault = ""
        self._open.set()
        await self._probe()
        _log.info("SGLang is up after %.1f s", time.monotonic() - begun)

    async def close(self) -> None:
        """Ends every generation as "aborted", then SGLang's processes."""
        for trajectory_id in list(self._turns):
            await self.abort(trajectory_id)
        engine, self._engine = self._engine, None
        self._fault = "it was closed"
        self._open.set()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    def _scheduler_died(self) -> None:
        _log.error("a process of SGLang failed (see the lines above); the sidecar ends")
        sglang_module("srt.utils").kill_process_tree(os.getpid(), include_parent=False)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    # --- generation ---------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples one turn, in as many parts as weights are swapped meanwhile."""
        turn = self._turns[request.trajectory_id] = _Turn()
        token_ids: list[int] = []
        log_probs: list[float] = []
        spans: list[VersionSpan] = []
        cached_tokens = 0
        finish = "aborted"
        try:
            while not turn.aborted:
                await self._open.wait()
                self._require_sound()
                if turn.aborted:
                    break
                turn.interrupted = False
                version, start = self.policy_version, len(token_ids)
                part = await self._sample(turn, request, token_ids)
                token_ids += part.token_ids
                log_probs += part.log_probs
                if part.token_ids:
                    spans.append(
                        VersionSpan(start=start, end=len(token_ids), policy_version=version)
                    )
                if start == 0:
                    cached_tokens = part.cached_tokens
                if part.finish != "abort":
                    finish = part.finish
                    break
                if not (turn.interrupted or turn.aborted):
                    raise RuntimeError("SGLang ended a generation that nobody had asked it to end")
        finally:
            del self._turns[request.trajectory_id]
        return GenerateResult(
            token_ids=token_ids,
            log_probs=log_probs,
            finish=finish,  # type: ignore[arg-type]
            policy_version=spans[-1].policy_version if spans else self.policy_version,
            version_spans=spans,
            cached_tokens=cached_tokens,
        )

    async def _sample(self, turn: _Turn, request: GenerateRequest, sampled: list[int]) -> _Part:
        """One request to SGLang, from the context and what has been sampled of this turn so far."""
        turn.request_id = uuid.uuid4().hex  # of fixed width: SGLang aborts by prefix
        self._enter()
        try:
            generator = self._manager.generate_request(
                sglang_module(IO).GenerateReqInput(
                    rid=turn.request_id,
                    input_ids=request.token_ids + sampled,
                    sampling_params=self._sampling_params(request, len(sampled)),
                    return_logprob=True,
                    logprob_start_len=-1,
                    # A namespace of the prefix cache: no version reads another's keys and values.
                    extra_key=f"version {self.policy_version}",
                ),
                None,
            )
            output = await anext(generator)
        except asyncio.CancelledError:
            self._manager.abort_request(turn.request_id)
            raise
        except Exception as error:
            if type(error).__name__ == "RequestAbortedError":  # before it reached the scheduler
                return _Part([], [], "abort", 0)
            raise
        finally:
            turn.request_id = ""
            self._leave()
        return read_output(output, request.stop_ids)

    def _sampling_params(self, request: GenerateRequest, sampled: int) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": request.max_tokens - sampled,
            "stop_token_ids": sorted(request.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if self.options.deterministic:
            params["sampling_seed"] = request.seed % 2**31
        return params

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
        """Replaces the weights between two tokens of every running generation; forgets every cached prefix.

        Raises ValueError, with nothing changed, if a tensor does not fit the model. RuntimeError if SGLang fails half
        way: then nothing is generated any more until a later push has gone through.
        """
        from rollout_sidecar.engines.sglang_weights import stage

        check_tensors(tensors, self._shapes)
        if changed is not None and not self._fault:
            tensors = {name: tensors[name] for name in tensors if name in changed}
        device = "cuda" if self._on_one_gpu else "cpu"
        buckets = await asyncio.to_thread(stage, tensors, self.options.bucket_bytes, device)
        begun = time.monotonic()
        self._open.clear()
        try:
            await self._empty()
            self._fault = f"the swap to version {policy_version} failed half way; push again"
            async with self._weight_update():
                for bucket in buckets:
                    await self._hand_over(bucket)
            await self._forget_prefixes()
            self.policy_version = policy_version
            self._fault = ""
            await self._probe()
        finally:
            self.pause_s = time.monotonic() - begun
            self._open.set()

    async def _empty(self) -> None:
        """Takes every generation out of the engine; what it has sampled stays with its turn."""
        for turn in self._turns.values():
            if turn.request_id:
                turn.interrupted = True
                self._manager.abort_request(turn.request_id)
        await self._idle.wait()

    @asynccontextmanager
    async def _weight_update(self) -> AsyncIterator[None]:
        """What newer releases want around updates; older ones do not know it."""
        manager, io = self._manager, sglang_module(IO)
        if not hasattr(manager, "begin_weight_update"):
            yield
            return
        _require(await manager.begin_weight_update(io.BeginWeightUpdateReqInput(), None))
        try:
            yield
        finally:
            _require(await manager.end_weight_update(io.EndWeightUpdateReqInput(), None))

    async def _hand_over(self, bucket: bytes) -> None:
        update = sglang_module(IO).UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[bucket] * self.options.tensor_parallel,
            load_format="flattened_bucket",
            flush_cache=False,
        )
        _require(await self._manager.update_weights_from_tensor(update, None))

    async def _forget_prefixes(self) -> None:
        answer = await self._manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S)
        if not answer.success:
            raise RuntimeError(
                f"SGLang did not drop its prefix cache within {FLUSH_TIMEOUT_S:g} s: "
                f"{getattr(answer, 'message', '')}"
            )

    async def _probe(self) -> None:
        """One greedy token: the engine answers, and its weights give finite log-probs."""
        params = {"temperature": 0.0, "max_new_tokens": 1}
        request = sglang_module(IO).GenerateReqInput(
            rid=uuid.uuid4().hex,
            input_ids=[0, min(1, self.vocab_size - 1)],
            sampling_params=params,
            return_logprob=True,
            extra_key="probe",
        )
        output = await anext(self._manager.generate_request(request, None))
        log_prob = output["meta_info"]["output_token_logprobs"][0][0]
        if log_prob is None or not math.isfinite(log_prob):
            self._fault = (
                f"weights {self.policy_version} give the log-prob {log_prob}; push finite ones"
            )
            raise RuntimeError(self._fault)

    # --- small parts --------------------------------------------------------------------------------------------

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager: what its HTTP server itself talks to."""
        if self._engine is None:
            raise RuntimeError(f"SGLang cannot be asked: {self._fault or 'it was closed'}")
        return self._engine.tokenizer_manager

    @property
    def _on_one_gpu(self) -> bool:
        on_cpu = self.options.extra.get("device") == "cpu"
        return not on_cpu and self.options.tensor_parallel == 1

    def _require_sound(self) -> None:
        if self._fault:
            raise RuntimeError(f"SGLang cannot generate: {self._fault}")

    def _enter(self) -> None:
        self._in_engine += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._in_engine -= 1
        if not self._in_engine:
            self._idle.set()


def read_output(output: Mapping[str, Any], stop_ids: frozenset[int]) -> _Part:
    """Ids and log-probs of one answer, the matched stop id once at its end.

    Releases differ in whether output_ids holds the stop id; output_token_logprobs always does.
    """
    meta = output["meta_info"]
    reason = meta["finish_reason"] or {"type": "abort"}
    pairs = [(float(entry[0]), int(entry[1])) for entry in meta.get("output_token_logprobs") or ()]
    if reason["type"] == "abort" and reason.get("status_code"):
        raise RuntimeError(f"SGLang refused the request: {reason.get('message')}")
    if reason["type"] == "stop":
        matched = reason.get("matched")
        while len(pairs) > 1 and pairs[-1][1] == matched and pairs[-2][1] == matched:
            pairs.pop()
        if not pairs or pairs[-1][1] not in stop_ids:
            raise RuntimeError(f"SGLang stopped at {matched!r}, which is not in its answer")
    return _Part(
        [token_id for _, token_id in pairs],
        [log_prob for log_prob, _ in pairs],
        reason["type"],
        int(meta.get("cached_tokens") or 0),
    )


def _require(answer: tuple[bool, str]) -> None:
    success, message = answer[:2]
    if not success:
        raise RuntimeError(f"SGLang did not take the weights: {message}")
