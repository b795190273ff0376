"""One request to SGLang and its answer: sampling options in, token ids with their log-probs out.

Log-probs are those that SGLang reports of the tokens it sampled, never those of a prefill (which ignore the
temperature). By case:

    temperature 0             of the untempered softmax
    temperature alone         of softmax(logits / temperature)
    with a top_k              of that, renormalised over what top_k and top_p leave (SGLang's sampling masks)
    with a top_p, no top_k    refused: SGLang reports the log-probs before the cut, and no mask without a top_k
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_sidecar.engines.base import GenerateRequest, GenerateResult
from rollout_sidecar.protocol import SamplingParams, VersionSpan


@dataclass
class Part:
    """What one request to SGLang sampled."""

    token_ids: list[int]
    log_probs: list[float]
    finish: str
    """stop, length or abort."""
    cached_tokens: int


def request_arguments(
    request: GenerateRequest, sampled: list[int], *, deterministic: bool
) -> dict[str, Any]:
    """Arguments of GenerateReqInput that go on from the context and what has been sampled of this turn so far.

    ValueError if the log-probs of the sampled distribution cannot be had.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": request.max_tokens - len(sampled),
        "stop_token_ids": sorted(request.stop_ids),
        # SGLang stops at the model's own end of sequence too, which the sidecar's stop ids always hold.
        "ignore_eos": not request.stop_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if deterministic:
        # SGLang adds the position to the seed, so that what goes on after a swap does not repeat itself.
        params["sampling_seed"] = request.seed % 2**31
    return {
        "input_ids": request.token_ids + sampled,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_sampling_mask": _is_cut(sampling),
    }


def _is_cut(sampling: SamplingParams) -> bool:
    """Whether top_k or top_p make the sampled distribution another than the softmax."""
    if sampling.temperature == 0:
        return False
    if sampling.top_p < 1 and not sampling.top_k:
        raise ValueError(
            f"top_p={sampling.top_p:g} without a top_k: SGLang gives log-probs of what top_p leaves only together "
            "with a top_k; set sampling.top_k too (for example 256), or sampling.top_p = 1"
        )
    return sampling.top_k > 0


def read_output(output: Mapping[str, Any], stop_ids: frozenset[int]) -> Part:
    """Ids and log-probs of one answer, the matched stop id once at its end.

    Releases differ in whether output_ids holds the stop id; output_token_logprobs always does.
    """
    meta = output["meta_info"]
    reason = meta["finish_reason"] or {"type": "abort"}
    if reason["type"] == "abort" and reason.get("status_code"):
        raise RuntimeError(f"SGLang refused the request: {reason.get('message')}")
    token_ids, log_probs = _sampled(meta)
    if reason["type"] == "stop":
        matched = reason.get("matched")
        while len(token_ids) > 1 and token_ids[-1] == matched and token_ids[-2] == matched:
            token_ids.pop()
            log_probs.pop()
        if not token_ids or token_ids[-1] not in stop_ids:
            raise RuntimeError(f"SGLang stopped at {matched!r}, which is not in its answer")
    return Part(token_ids, log_probs, reason["type"], int(meta.get("cached_tokens") or 0))


def joined(parts: list[tuple[int, Part]], finish: str, policy_version: int) -> GenerateResult:
    """One turn of what was sampled in parts, each under one version; `policy_version` is now's."""
    spans: list[VersionSpan] = []
    for version, part in parts:
        start = spans[-1].end if spans else 0
        end = start + len(part.token_ids)
        if end > start:
            spans.append(VersionSpan(start=start, end=end, policy_version=version))
    return GenerateResult(
        token_ids=[token_id for _, part in parts for token_id in part.token_ids],
        log_probs=[log_prob for _, part in parts for log_prob in part.log_probs],
        finish=finish,  # type: ignore[arg-type]
        policy_version=spans[-1].policy_version if spans else policy_version,
        version_spans=spans,
        cached_tokens=parts[0][1].cached_tokens if parts else 0,
    )


def _sampled(meta: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The sampled tokens, and the log-prob of each under the sampled distribution."""
    reported = meta.get("output_token_logprobs") or ()
    log_probs, token_ids = ([entry[i] for entry in reported] for i in (0, 1))
    cut = meta.get("output_token_sampling_logprobs")
    if cut is not None:
        if len(cut) != len(token_ids):
            raise RuntimeError(
                f"SGLang gives {len(cut)} log-probs of the cut distribution for {len(token_ids)} tokens"
            )
        log_probs = cut
    return list(map(int, token_ids)), list(map(float, log_probs))
