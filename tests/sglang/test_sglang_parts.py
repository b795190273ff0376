"""What of the SGLang engine needs no SGLang: its answers read, its releases checked, its failures told."""

import importlib.metadata

import pytest

from rollout_sidecar.engines.sglang_sampling import read_output
from rollout_sidecar.engines.sglang_setup import check_version


def answer(pairs, reason):
    return {
        "meta_info": {
            "finish_reason": reason,
            "output_token_logprobs": [[log_prob, token, None] for token, log_prob in pairs],
            "cached_tokens": 3,
        }
    }


def test_an_answer_is_read_with_its_stop_id_once():
    stop = {"type": "stop", "matched": 7}
    for tokens in ([4, 5, 7], [4, 5, 7, 7]):
        part = read_output(answer([(t, -0.5) for t in tokens], stop), frozenset({7}))
        assert (part.token_ids, part.log_probs) == ([4, 5, 7], [-0.5] * 3)
        assert (part.finish, part.cached_tokens) == ("stop", 3)
    with pytest.raises(RuntimeError, match="SGLang stopped at 7, which is not in its answer"):
        read_output(answer([(4, -0.5)], stop), frozenset({7}))


def test_a_refusal_is_an_error_and_an_abort_is_not():
    refused = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(RuntimeError, match="SGLang refused the request: too long"):
        read_output(answer([], refused), frozenset({7}))
    part = read_output(answer([(4, -0.5)], {"type": "abort"}), frozenset({7}))
    assert (part.token_ids, part.finish) == ([4], "abort")


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
