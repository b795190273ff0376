"""Refuses what an engine sampled if it cannot be trained on, before it reaches a trainer."""

import math

from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.errors import EngineError


def check_result(request: GenerateRequest, result: GenerateResult, vocab_size: int) -> None:
    """Raises EngineError unless the result is what was asked for: in number, ids, log-probs and stop ids."""
    ids, log_probs = result.token_ids, result.log_probs
    if len(ids) != len(log_probs):
        raise EngineError(f"the engine returned {len(ids)} ids with {len(log_probs)} log-probs")
    covered = [i for span in result.version_spans for i in range(span.start, span.end)]
    if covered and covered != list(range(len(ids))):
        raise EngineError(f"the engine's versions are not those of its {len(ids)} tokens, in order")
    if not ids and result.finish != "aborted":
        raise EngineError("the engine returned no token")
    if len(ids) > request.max_tokens:
        raise EngineError(f"the engine returned {len(ids)} ids, {request.max_tokens} were allowed")
    if result.finish == "stop" and ids[-1] not in request.stop_ids:
        raise EngineError(f"the engine stopped at id {ids[-1]}, which is not a stop id")
    if not request.stop_ids.isdisjoint(ids[:-1]):
        passed = next(token_id for token_id in ids[:-1] if token_id in request.stop_ids)
        raise EngineError(f"the engine went on after the stop id {passed}")
    if not ids or (0 <= min(ids) and max(ids) < vocab_size and all(map(math.isfinite, log_probs))):
        return
    for token_id, log_prob in zip(ids, log_probs, strict=True):
        if not 0 <= token_id < vocab_size:
            raise EngineError(f"the engine returned the id {token_id}; it has {vocab_size}")
        if not math.isfinite(log_prob):
            raise EngineError(f"the engine returned the log-prob {log_prob} for id {token_id}")
