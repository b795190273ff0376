"""The routes over real HTTP on loopback: streams, idempotency, authentication, limits, and answers to mistakes."""

import asyncio
import json

import aiohttp
import msgspec
import pytest
from sidecar_cases import (
    CounterTool,
    Push,
    call,
    fault,
    lines,
    make_agent,
    make_request,
    make_task,
    post,
    put_part,
    serving,
)

from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.protocol import (
    JSON,
    MSGPACK,
    Info,
    WeightsCommitted,
    WeightsStatus,
    content_hash,
    decode,
    encode,
)
from rollout_sidecar.server import check_exposure

BINARY = {"Content-Type": MSGPACK}


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


# --- mistakes ---------------------------------------------------------------------------------------------------


def changed(**fields):
    """A request as plain data, with fields replaced."""
    return {**msgspec.to_builtins(make_request(samples=2)), **fields}


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (changed(limits={"max_turns": "8"}), "$.limits.max_turns", "Expected `int`, got `str`"),
        (changed(limits={"max_turnz": 8}), "$.limits", "unknown field `max_turnz`"),
        (changed(sampling={"top_p": 0}), "$.sampling.top_p", "> 0.0"),
        *(
            (changed(tasks=[{"task_id": "t", "messages": [], **fields}]), "$.tasks[0]", message)
            for fields, message in (
                (
                    {"tools_kwargs": {"x": {"create_kwargs": 3}}},
                    "tools_kwargs.x.create_kwargs must",
                ),
                (
                    {"tools_kwargs": {"x": {"creat_kwargs": {}}}},
                    "tools_kwargs.x has the unknown key",
                ),
                ({"tools_kwargs": {"x": 3}}, "tools_kwargs.x must be an object, got 3"),
                ({"messages": [{"role": "usr", "content": ""}]}, "messages[0].role is 'usr', exp"),
            )
        ),
        (changed(request_id="a/b"), "$.request_id", "matching regex"),
        (
            changed(tasks=[{"task_id": "t", "messages": []}]),
            "$.tasks[0].messages",
            "has no messages",
        ),
        (
            changed(rollouts=[{"task_index": 1, "sample_index": 0, "seed": 0}]),
            "$.rollouts[0].task_index",
            "task_index=1, but there are 1 tasks",
        ),
        (
            changed(rollouts=[{"task_index": 0, "sample_index": 0, "seed": 2**63}]),
            "$.rollouts[0].seed",
            "not below 2**63",
        ),
        (
            changed(rollouts=[{"task_index": 0, "sample_index": 0, "seed": s} for s in (1, 2)]),
            "$.rollouts[1].sample_index",
            "sample 0 of task 0 is asked for twice",
        ),
    ],
)
async def test_an_invalid_request_is_told_which_field(tiny_tokenizer, http, body, field, message):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, _):
        async with http.post(f"{url}/v1/rollouts", json=body) as response:
            error = await fault(response, 400, "invalid_request")
    assert error.field == field
    assert message in error.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"request_id": "\xff"}']
)
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
async def test_garbage_is_a_400_in_either_encoding(tiny_tokenizer, http, body, content_type):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, _):
        for path in ("/v1/rollouts", "/v1/weights/1"):
            headers = {"Content-Type": content_type}
            async with http.post(url + path, data=body, headers=headers) as response:
                assert response.status == 400
                assert response.content_type == content_type
        async with http.get(f"{url}/healthz") as response:
            assert response.status == 200


async def test_other_mistakes_have_fitting_answers(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"]), max_body_bytes=100) as (url, _):
        async with http.get(f"{url}/v1/nothing") as response:
            await fault(response, 404, "not_found")
        async with http.put(f"{url}/v1/info") as response:
            await fault(response, 405, "method_not_allowed")
            assert response.headers["Allow"] == "GET,HEAD"
        async with http.post(f"{url}/v1/rollouts", data=b"x" * 101) as response:
            assert "100 bytes" in (await fault(response, 413, "too_large")).message
        for path in ("/v1/rollouts/r?from=-1", "/readyz?version=new"):
            async with http.get(url + path) as response:
                assert (
                    "must be a whole number"
                    in (await fault(response, 400, "invalid_request")).message
                )


async def test_a_request_for_newer_weights_than_there_are_is_refused(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, _):
        body = encode(make_request(min_policy_version=1), JSON)
        async with http.post(f"{url}/v1/rollouts", data=body) as response:
            error = await fault(response, 409, "policy_version")
            assert "version 0 is being served, and min_policy_version=1" in error.message
        agent.engine.policy_version = 1
        frames = await post(http, url, make_request(min_policy_version=1))
        assert frames[0].trajectory.turns[0].policy_version == 1
        # A request that was admitted can be read again, whatever is served by then.
        agent.engine.policy_version = 0
        assert await post(http, url, make_request(min_policy_version=1)) == frames


# --- authentication ---------------------------------------------------------------------------------------------


async def test_a_token_is_asked_for_everywhere_but_at_health(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"]), token="s3cret") as (url, _):
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in ("/v1/info", "/metrics", "/v1/nothing"):
                async with http.get(url + path, headers=given) as response:
                    await fault(response, 401, "unauthorized")
        async with http.get(
            f"{url}/v1/info", headers={"Authorization": "Bearer s3cret"}
        ) as response:
            assert response.status == 200
        for path in ("/healthz", "/readyz"):
            async with http.get(url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "sidecar.example.com"])
def test_an_address_that_others_reach_needs_a_token(host):
    with pytest.raises(ValueError, match=f"--host {host} can be reached .* give --token_file"):
        check_exposure(host, "")
    check_exposure(host, "s3cret")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    check_exposure(host, "")


# --- state ------------------------------------------------------------------------------------------------------


async def test_info_says_what_is_served(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, ["#### 2"], CounterTool(), max_model_tokens=777)
    async with serving(agent, model="tiny") as (url, _), http.get(f"{url}/v1/info") as response:
        info = decode(await response.read(), JSON, Info)
    assert (info.protocol_version, info.model, info.engine, info.tool_format) == (
        1,
        "tiny",
        "scripted",
        "hermes",
    )
    assert (info.vocab_size, info.vocab_hash) == (
        tiny_tokenizer.vocab_size,
        tiny_tokenizer.vocab_hash,
    )
    assert (info.policy_version, info.max_model_tokens, info.content_hash) == (0, 777, "")
    assert info.tools == [CounterTool().tool_schema]


async def test_before_the_engine_has_started_only_health_answers(tiny_tokenizer, http):
    async with serving(make_agent(tiny_tokenizer, ["#### 2"]), start=False) as (url, sidecar):
        async with http.get(f"{url}/healthz") as response:
            assert response.status == 200
        for method, path, body in (
            ("GET", "/readyz", b""),
            ("GET", "/v1/info", b""),
            ("POST", "/v1/rollouts", encode(make_request(), JSON)),
            ("POST", "/v1/weights/1", encode(Push().manifest, JSON)),
        ):
            async with http.request(method, url + path, data=body) as response:
                assert "still loading" in (await fault(response, 503, "not_ready")).message
        await sidecar.start()
        async with http.get(f"{url}/readyz") as response:
            assert response.status == 200


async def test_weights_are_pushed_over_http_and_change_what_is_served(tiny_tokenizer, http):
    agent, push = make_agent(tiny_tokenizer, ["#### 2"]), Push()
    async with serving(agent) as (url, _):
        weights = f"{url}/v1/weights/1"
        async with http.post(
            weights, data=encode(push.manifest, MSGPACK), headers=BINARY
        ) as response:
            status = decode(await response.read(), MSGPACK, WeightsStatus)
        assert status == WeightsStatus(version=1, missing_parts=[0, 1, 2])
        for i, part in enumerate(push.parts):
            async with http.put(f"{weights}/parts/{i}", data=part) as response:
                assert response.status == 200
        async with http.get(f"{url}/readyz?version=1") as response:
            assert (await fault(response, 503, "not_ready")).message == "serving version 0"
        async with http.post(f"{weights}/commit") as response:
            done = decode(await response.read(), JSON, WeightsCommitted)
        assert done == WeightsCommitted(version=1, content_hash=content_hash(push.manifest.tensors))
        async with http.get(f"{url}/readyz?version=1") as response:
            assert response.status == 200
        async with http.post(f"{url}/v1/weights/9/commit") as response:
            await fault(response, 404, "not_begun")
        async with http.get(f"{url}/metrics") as response:
            text = await response.text()
    assert 'tooljax_sidecar_weight_commits_total{result="ok"} 1\n' in text
    assert 'tooljax_sidecar_weight_commits_total{result="not_begun"} 1\n' in text
    assert "tooljax_sidecar_policy_version 1\n" in text


async def test_new_rollouts_wait_while_weights_are_swapped(tiny_tokenizer, http):
    swapping, go = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedEngine):
        async def load_weights(self, tensors, policy_version, changed=None):
            swapping.set()
            await go.wait()
            await super().load_weights(tensors, policy_version)

    agent, push = make_agent(tiny_tokenizer, []), Push()
    agent.engine = Slow(tiny_tokenizer, ["#### 2"])
    async with serving(agent) as (url, sidecar):
        sidecar.weights.begin(1, push.manifest)
        for i, part in enumerate(push.parts):
            await put_part(sidecar.weights, 1, i, part)
        committing = asyncio.create_task(sidecar.weights.commit(1))
        await swapping.wait()
        reading = asyncio.create_task(post(http, url, make_request()))
        async with http.get(f"{url}/readyz") as response:
            await fault(response, 503, "not_ready")
        await asyncio.sleep(0.05)
        assert agent.engine.requests == []
        go.set()
        await committing
        frames = await reading
    assert frames[0].trajectory.turns[0].policy_version == 1


async def test_counters_tell_what_happened(tiny_tokenizer, http):
    agent = make_agent(tiny_tokenizer, [call("counter"), call("abacus"), "#### 2"], CounterTool())
    async with serving(agent) as (url, _):
        frames = await post(http, url, make_request(samples=2))
        async with http.get(f"{url}/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            samples = (await response.text()).splitlines()
    sampled = sum(sum(frame.trajectory.loss_mask) for frame in frames[:-1])
    for line in (
        'rollouts_total{status="completed"} 2',
        "turns_total 6",
        f"completion_tokens_total {sampled}",
        'tool_calls_total{status="ok",tool="counter"} 2',
        'tool_calls_total{status="unknown_tool",tool="unknown"} 2',
        'http_requests_total{method="POST",route="/v1/rollouts",status="200"} 1',
        "running_rollouts 0",
    ):
        assert f"tooljax_sidecar_{line}" in samples


def test_labels_are_escaped():
    metrics = Metrics()
    metrics.count("tool_calls_total", tool='a"b\\c\nd', status="ok")
    assert 'tool_calls_total{status="ok",tool="a\\"b\\\\c\\nd"} 1' in metrics.render()


async def test_a_request_by_hand_needs_little(tiny_tokenizer, http):
    body = {
        "request_id": "by-hand",
        "tasks": [{"task_id": "1", "messages": make_task().messages}],
        "rollouts": [{"task_index": 0, "sample_index": 0, "seed": 1}],
    }
    async with serving(make_agent(tiny_tokenizer, ["#### 2"])) as (url, _):
        async with http.post(f"{url}/v1/rollouts", data=json.dumps(body)) as response:
            frames = await lines(response)
    assert frames[0].trajectory.status == "completed"
    # No ground truth: the reward function fails, and says so.
    assert not frames[0].trajectory.scored
    assert "the ground truth None is not a number" in frames[0].trajectory.error
