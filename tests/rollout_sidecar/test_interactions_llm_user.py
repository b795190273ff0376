"""A language model as the user, asked over HTTP from a real server that speaks the OpenAI chat protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from sidecar_cases import CounterTool, call, make_agent, make_task, play, serving

from rollout_sidecar.interactions.llm_user import LlmUserInteraction, other_side
from rollout_sidecar.protocol import Trajectory

Answer = str | tuple[int, dict[str, str]]
"""What the model says, or a status and headers."""


class Endpoint:
    """An OpenAI-compatible server that plays a script and keeps what it was asked."""

    def __init__(self, *answers: Answer):
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            status, headers = answer
            body = {"error": {"message": "slow down"}}
            return web.json_response(body, status=status, headers=headers)
        if answer == "hang":
            await asyncio.sleep(60)
        if answer == "no choices":
            return web.json_response({"choices": []})
        message = {"role": "assistant", "content": answer}
        return web.json_response({"object": "chat.completion", "choices": [{"message": message}]})


@asynccontextmanager
async def endpoint(*answers: Answer) -> AsyncIterator[Endpoint]:
    server = Endpoint(*answers)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


def user_of(url: str, **config: Any) -> LlmUserInteraction:
    defaults = {"base_url": url, "model": "user", "system_prompt": "You want {{ goal }}."}
    return LlmUserInteraction({"name": "customer", **defaults, **config})


async def converse(
    tokenizer,
    server: Endpoint,
    script: Any,
    *tools,
    task: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    **config: Any,
) -> Trajectory:
    """A trajectory with this user, in a sidecar that starts and stops it."""
    agent = make_agent(tokenizer, script, *tools)
    agent.interactions = {"customer": user_of(server.url, **config)}
    kwargs = {"name": "customer", "goal": "two"} if task is None else task
    async with serving(agent):
        return await play(
            agent, make_task(interaction="customer", interaction_kwargs=kwargs), **(limits or {})
        )


async def test_the_model_plays_the_user_until_it_is_done(tiny_tokenizer):
    script = ["How may I help?", "<think>hm</think>#### 2"]
    async with endpoint("Count on.", "Thank you. ###DONE###") as server:
        config = {"max_tokens": 9, "temperature": 0.5, "seed": 7, "done_score": 0.75}
        trajectory = await converse(tiny_tokenizer, server, script, **config)
    assert trajectory.status == "completed"
    replies = [turn.reply for turn in trajectory.turns]
    assert [(r.text, r.score, r.done) for r in replies if r] == [
        ("Count on.", 0.0, False),
        ("Thank you.", 0.75, True),
    ]
    first, second = server.requests
    assert {key: value for key, value in first.items() if key != "messages"} == {
        "model": "user",
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 7,
    }
    # The user's own words are the model's, the policy's are its user's; no thinking, no system message of the policy.
    assert second["messages"] == [
        {"role": "system", "content": "You want two."},
        {"role": "user", "content": "Hi! How can I help you?"},
        {"role": "assistant", "content": "Count to two."},
        {"role": "user", "content": "How may I help?"},
        {"role": "assistant", "content": "Count on."},
        {"role": "user", "content": "#### 2"},
    ]
    assert first["messages"] == second["messages"][:4]
    assert "Authorization" not in server.headers[0]


async def test_turns_that_call_tools_are_not_shown(tiny_tokenizer):
    async with endpoint("###DONE###") as server:
        script = [call("counter"), "It is 1."]
        await converse(tiny_tokenizer, server, script, CounterTool())
        shown = server.requests[0]["messages"]
    assert [m["content"] for m in shown] == [
        *("You want two.", "Hi! How can I help you?", "Count to two.", "It is 1."),
    ]


def test_messages_of_one_side_in_a_row_are_joined():
    messages = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert other_side(messages, "s", "") == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a\nb\n\nc"},
        {"role": "user", "content": "d"},
    ]


async def test_the_default_prompt_shows_all_that_the_task_says(tiny_tokenizer):
    async with endpoint("###DONE###") as server:
        task = {"goal": "two apples", "mood": "angry"}
        await converse(tiny_tokenizer, server, ["#### 2"], task=task, system_prompt=None)
        system = server.requests[0]["messages"][0]["content"]
    assert "goal: two apples\nmood: angry\n" in system
    assert system.endswith("say ###DONE###.")


async def test_a_variable_that_the_task_lacks_is_an_interaction_error(tiny_tokenizer):
    async with endpoint() as server:
        trajectory = await converse(tiny_tokenizer, server, ["#### 2"], task={"mood": "angry"})
    assert trajectory.status == "interaction_error"
    assert "interaction_kwargs has ['mood']: 'goal' is undefined" in trajectory.error


async def test_the_key_comes_from_the_environment_and_is_never_shown(tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("USER_MODEL_KEY", "secret-key-1")
    async with endpoint((401, {"X": "secret-key-1"})) as server:
        trajectory = await converse(
            tiny_tokenizer, server, ["#### 2"], api_key_env="USER_MODEL_KEY"
        )
        assert server.headers[0]["Authorization"] == "Bearer secret-key-1"
    assert trajectory.status == "interaction_error"
    assert "answered with status 401" in trajectory.error
    assert "secret" not in trajectory.error
    monkeypatch.delenv("USER_MODEL_KEY")
    with pytest.raises(ValueError, match="api_key_env='USER_MODEL_KEY' names .* not set"):
        user_of("http://127.0.0.1:9/v1", api_key_env="USER_MODEL_KEY")


async def test_temporary_failures_are_tried_again(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("rollout_sidecar.interactions.llm_user.FIRST_PAUSE_S", 0.01)
    async with endpoint((429, {"Retry-After": "0.2"}), (503, {}), "###DONE###") as server:
        trajectory = await converse(tiny_tokenizer, server, ["#### 2"])
    assert trajectory.status == "completed"
    assert len(server.requests) == 3
    assert trajectory.turns[0].reply is not None
    assert 0.2 <= trajectory.turns[0].reply.latency_s < 2


@pytest.mark.parametrize(
    ("answers", "config", "error"),
    [
        ([(500, {})] * 2, {"retries": 1}, "answered with status 500"),
        ([(400, {})], {}, "answered with status 400"),
        (["no choices"], {}, "answered without choices[0].message.content"),
        (["hang"], {"timeout_s": 0.1, "retries": 0}, "gave no answer within 0.1 s"),
    ],
)
async def test_other_failures_are_interaction_errors(
    tiny_tokenizer, monkeypatch, answers, config, error
):
    monkeypatch.setattr("rollout_sidecar.interactions.llm_user.FIRST_PAUSE_S", 0.01)
    async with endpoint(*answers) as server:
        trajectory = await converse(tiny_tokenizer, server, ["#### 2"], **config)
        assert len(server.requests) == len(answers)
    assert trajectory.status == "interaction_error"
    assert error in trajectory.error
    assert sum(trajectory.loss_mask) > 0


async def test_the_deadline_of_a_reply_holds_over_all_attempts(tiny_tokenizer):
    """Pain point 13."""
    async with endpoint(*[(429, {"Retry-After": "60"})] * 3) as server:
        async with asyncio.timeout(5):
            trajectory = await converse(
                tiny_tokenizer, server, ["#### 2"], limits={"tool_timeout_s": 0.3}
            )
    assert trajectory.status == "interaction_error"
    assert trajectory.error.endswith("gave no answer within 0.3 s")


async def test_nobody_there_is_told_with_the_address(tiny_tokenizer, unused_tcp_port):
    server = Endpoint()
    server.url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    trajectory = await converse(tiny_tokenizer, server, ["#### 2"], retries=0)
    assert trajectory.status == "interaction_error"
    assert f"{server.url}/chat/completions could not be reached" in trajectory.error


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"base_url": "localhost"}, "base_url is 'localhost', expected an address"),
        ({"model": None}, "model is missing"),
        ({"done_marker": ""}, "done_marker is empty"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number of at least 1"),
        ({"timeout_s": -1}, "timeout_s is -1, expected seconds above 0"),
        ({"system_prompt": "{{ goal"}, "system_prompt is no template"),
    ],
)
def test_bad_settings_are_named(config, problem):
    with pytest.raises(ValueError, match=problem):
        user_of("http://127.0.0.1:9/v1", **config)
