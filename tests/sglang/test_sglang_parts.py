"""What of the SGLang engine needs no SGLang: its answers read, its releases checked, its failures told."""

import importlib.metadata
import subprocess
import sys
import time

import numpy as np
import pytest
from sglang_cases import request

from rollout_sidecar.engines import sglang_memory
from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.engines.sglang_process import LogTail, start_failure
from rollout_sidecar.engines.sglang_sampling import read_output, request_arguments
from rollout_sidecar.engines.sglang_setup import SglangOptions, check_version, engine_arguments
from rollout_sidecar.protocol import SamplingParams

# --- answers ------------------------------------------------------------------------------------------------------


def answer(pairs, reason, **meta):
    return {
        "meta_info": {
            "finish_reason": reason,
            "output_token_logprobs": [[log_prob, token, None] for token, log_prob in pairs],
            "cached_tokens": 3,
            **meta,
        }
    }


STOP_AT_7 = {"type": "stop", "matched": 7}


def test_an_answer_is_read_with_its_stop_id_once():
    for tokens in ([4, 5, 7], [4, 5, 7, 7]):
        part = read_output(answer([(t, -0.5) for t in tokens], STOP_AT_7), frozenset({7}))
        assert (part.token_ids, part.log_probs) == ([4, 5, 7], [-0.5] * 3)
        assert (part.finish, part.cached_tokens) == ("stop", 3)
    with pytest.raises(RuntimeError, match="SGLang stopped at 7, which is not in its answer"):
        read_output(answer([(4, -0.5)], STOP_AT_7), frozenset({7}))


def test_a_refusal_is_an_error_and_an_abort_is_not():
    refused = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(RuntimeError, match="SGLang refused the request: too long"):
        read_output(answer([], refused), frozenset({7}))
    part = read_output(answer([(4, -0.5)], {"type": "abort"}), frozenset({7}))
    assert (part.token_ids, part.finish) == ([4], "abort")


def test_log_probs_of_a_cut_distribution_win():
    pairs = [(4, -2.0), (7, -3.0)]
    cut = answer(pairs, STOP_AT_7, output_token_sampling_logprobs=[-0.5, -1.0])
    assert read_output(cut, frozenset({7})).log_probs == [-0.5, -1.0]
    short = answer(pairs, STOP_AT_7, output_token_sampling_logprobs=[-0.5])
    with pytest.raises(RuntimeError, match="1 log-probs of the cut distribution for 2 tokens"):
        read_output(short, frozenset({7}))


# --- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "masked"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=20), True),
        (SamplingParams(top_k=20, top_p=0.9), True),
        (SamplingParams(temperature=0.0, top_p=0.9), False),
    ],
)
def test_masks_are_asked_for_where_they_change_the_log_probs(sampling, masked):
    made = request_arguments(request(0, sampling=sampling), [], deterministic=False)
    assert made["return_sampling_mask"] is masked
    assert "sampling_seed" not in made["sampling_params"]


def test_a_cut_without_masks_is_refused():
    with pytest.raises(ValueError, match=r"top_p=0\.9 without a top_k: .* sampling\.top_p = 1"):
        request_arguments(request(0, sampling=SamplingParams(top_p=0.9)), [], deterministic=False)


def test_what_goes_on_after_a_swap_has_the_rest_of_its_tokens():
    made = request_arguments(request(5, [1, 2], max_tokens=10), [8, 9], deterministic=True)
    assert made["input_ids"] == [1, 2, 8, 9]
    assert made["sampling_params"]["max_new_tokens"] == 8
    assert made["sampling_params"]["sampling_seed"] == 5


# --- the start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "needs SGLang: pip install"), ("0.4.9", "SGLang 0.4.9 is installed, and this sidecar")],
)
def test_other_releases_are_refused(monkeypatch, found, message):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(ValueError, match=message):
        check_version(any_version=False)
    if found:
        check_version(any_version=True)


def test_backends_are_sglangs_choice_unless_named():
    made = engine_arguments("model", 1024, SglangOptions())
    assert not {"attention_backend", "sampling_backend", "base_gpu_id"} & set(made)
    options = SglangOptions(first_gpu=2, extra={"attention_backend": "triton", "dtype": "float16"})
    made = engine_arguments("model", 1024, options)
    assert (made["base_gpu_id"], made["attention_backend"]) == (2, "triton")
    assert made["dtype"] == "float16"


LOG = """\
[2026-01-01 00:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run_scheduler_process
    scheduler = Scheduler()
{}
"""


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            r"Not enough memory.* - the model and its KV cache do not fit: use more GPUs \(--tp\)",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
            r"20\.00 GiB\. - the model and its KV cache do not fit",
        ),
        ("RuntimeError: No accelerator is available.", "is available. - SGLang needs a GPU"),
        ("RuntimeError: CUDA error: invalid device ordinal", "fewer GPUs than --tp times --dp"),
        ("zmq.error.ZMQError: Address already in use", "another process has a port that SGLang"),
        ("KeyError: 'rope'", "SGLang did not start: KeyError: 'rope'$"),
    ],
)
def test_a_start_that_fails_is_told_in_a_sentence(raised, told):
    error = RuntimeError("Rank 0 scheduler died during initialization (exit code: 1).")
    sentence = start_failure(error, LOG.format(raised).splitlines())
    with pytest.raises(ValueError, match=told):
        raise ValueError(sentence)


def test_without_a_log_the_error_itself_is_told():
    error = ValueError("context_length is too large")
    assert (
        start_failure(error, []) == "SGLang did not start: ValueError: context_length is too large"
    )


def test_lines_of_child_processes_are_kept_and_still_written(capfd):
    log = LogTail()
    with log.kept():
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; input(); print('late', file=sys.stderr)"],
            stdin=subprocess.PIPE,
        )
    child.communicate(b"\n")
    deadline = time.monotonic() + 10
    while not log.lines() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("ours", file=sys.stderr)
    assert log.lines() == ["late"]
    assert capfd.readouterr().err.splitlines() == ["late", "ours"]


# --- staging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 2**20])
@pytest.mark.parametrize("piece_bytes", [1, 7, 256, 4096])
def test_every_byte_of_every_tensor_lies_where_its_bucket_says(bucket_bytes, piece_bytes):
    pytest.importorskip("torch")
    from rollout_sidecar.engines.sglang_weights import buckets, fill, pieces

    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 256, size, np.uint8) for size in (300, 1, 0, 256, 513, 2)]
    tensors = {str(i): WeightTensor(str(i), "uint8", a.shape, a.data) for i, a in enumerate(arrays)}
    found = []
    for places in buckets(tensors.values(), bucket_bytes):
        flat = np.zeros(places[-1].end, np.uint8)
        cut = pieces(places, piece_bytes)
        assert [piece.end - piece.start for piece in cut[:-1]] == [piece_bytes] * (len(cut) - 1)
        for piece in cut:
            fill(flat[piece.start : piece.end], piece)
        found += [flat[place.start : place.end] for place in places]
        assert len(places) == 1 or len(flat) <= bucket_bytes
        assert flat.sum() == sum(found[-i].sum() for i in range(1, len(places) + 1))
    assert [each.tolist() for each in found] == [array.tolist() for array in arrays]


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 2**20])
@pytest.mark.parametrize("at_once", [1, 2, 6])
def test_tensors_reach_their_places_in_whatever_order_they_come(monkeypatch, bucket_bytes, at_once):
    pytest.importorskip("torch")
    from rollout_sidecar.engines import sglang_weights

    def contents(flat, places):
        return {place.tensor.name: flat[place.start : place.end].tolist() for place in places}

    monkeypatch.setattr(sglang_weights, "PIECE_BYTES", 128)
    monkeypatch.setattr(sglang_weights, "_handle", contents)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 256, size, np.uint8) for size in (300, 1, 0, 256, 513, 2)]
    tensors = [WeightTensor(str(i), "uint8", a.shape, a.data) for i, a in enumerate(arrays)]
    by_name = {tensor.name: tensor for tensor in tensors}

    def begun(version):
        made = sglang_weights.Buckets(tensors, version, bucket_bytes, "cpu")
        for start in range(0, 6, at_once):
            made.add([tensors[(5 * i) % 6] for i in range(start, start + at_once)])
        return made

    expected = {tensor.name: list(bytes(tensor.data)) for tensor in tensors}
    early, other, dropped = begun(3), begun(2), begun(3)
    dropped.drop()
    for some in (early, other, dropped, None):
        handles = sglang_weights.finish(some, by_name, 3, bucket_bytes, "cpu")
        found = {name: bytes_ for handle in handles for name, bytes_ in handle.items()}  # type: ignore
        assert found == expected
    with pytest.raises(RuntimeError):
        early.add(tensors)  # it was used
    other.add(tensors)  # it was not: those are of another version
    other.drop()


def test_memory_that_sglang_keeps_is_told(caplog):
    gib = 2**30
    sglang_memory.warn_if_kept((10 * gib, 140 * gib), (40 * gib, 140 * gib))
    assert not caplog.records
    sglang_memory.warn_if_kept((10 * gib, 140 * gib), (10 * gib + 27 * 2**20, 140 * gib))
    assert "and 27 MiB of the device's 143360 MiB became free" in caplog.text
