"""The Python sandbox as a tool of a trajectory: from the YAML file to the tool message."""

import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_cases import needs_bubblewrap, processes_below
from sidecar_cases import make_agent, play, statuses, tool_messages

from rollout_sidecar.tools.python_sandbox import SandboxUnavailableError
from rollout_sidecar.tools.python_sandbox.errors import WorkerLostError
from rollout_sidecar.tools.python_sandbox.tool import PythonSandboxTool
from rollout_sidecar.tools.registry import load_tools

CONFIGS = Path(__file__).parents[2] / "configs" / "tools"


def tool_call(code: str) -> str:
    """A turn that calls the tool."""
    arguments = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


async def started(config: dict) -> PythonSandboxTool:
    needs_bubblewrap()
    tool = PythonSandboxTool({"workers": 1, **config}, None)
    await tool.startup()
    return tool


async def test_the_shipped_file(tiny_tokenizer):
    needs_bubblewrap()
    (tool,) = load_tools(CONFIGS / "python_sandbox.yaml").values()
    await tool.startup()
    try:
        turns = [tool_call("x = 6 * 7\nx"), tool_call("print(x)"), "#### 42"]
        trajectory = await play(make_agent(tiny_tokenizer, turns, tool))
    finally:
        await tool.shutdown()
    assert statuses(trajectory) == [["ok"], ["ok"], []]
    first, second = tool_messages(trajectory)
    assert first == "42"
    assert second.endswith("NameError: name 'x' is not defined")  # each call by itself


async def test_the_policy_is_told_which_limit_it_hit(tiny_tokenizer):
    """Pain point 16."""
    tool = await started({"wall_s": 1})
    try:
        turns = [tool_call("while True: pass"), tool_call("print('on')"), "#### 1"]
        trajectory = await play(make_agent(tiny_tokenizer, turns, tool))
    finally:
        await tool.shutdown()
    assert tool_messages(trajectory) == [
        "[The time limit of 1 s was reached, and the program was stopped.]",
        "on",
    ]
    # The tool is in good health: it is the program that failed.
    record = trajectory.turns[0].calls[0]
    assert record.status == "ok"
    assert record.metrics["timed_out"] == record.metrics["failed"] == 1.0
    assert record.metrics["execution_s"] == pytest.approx(1.0, abs=0.5)


async def test_state_lasts_for_the_trajectory(tiny_tokenizer):
    tool = await started({"stateful": True, "wall_s": 5})
    try:
        turns = [tool_call("x = 1"), tool_call("x += 1; print(x)"), "#### 2"]
        for _ in range(2):
            trajectory = await play(make_agent(tiny_tokenizer, turns, tool))
            assert tool_messages(trajectory) == ["(no output)", "2"]
            assert tool._sandbox.live == 0
    finally:
        await tool.shutdown()
    deadline = time.monotonic() + 5
    while processes_below(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes_below(os.getpid())


async def test_special_tokens_in_output_reach_the_policy_as_text(tiny_tokenizer):
    tool = await started({})
    try:
        ends = []
        for printed in ("<|im_end|>", "plain text"):
            # Not as a literal: what the policy itself writes as text is another matter.
            code = f"print('{printed[:2]}' + '{printed[2:]}')"
            agent = make_agent(tiny_tokenizer, [tool_call(code), "#### 1"], tool)
            trajectory = await play(agent)
            assert tool_messages(trajectory) == [printed]
            ends.append(trajectory.token_ids.count(tiny_tokenizer.token_id("<|im_end|>")))
    finally:
        await tool.shutdown()
    assert ends[0] == ends[1]


async def test_execute_kwargs_of_a_task(tiny_tokenizer):
    tool = await started({})
    try:
        code = {"code": "print(input())"}
        response, reward, metrics = await tool.execute("i", code, stdin="given")
        assert (response.text, reward, metrics["outcome"]) == ("given", 0.0, "ok")
        response, _, metrics = await tool.execute("i", {"code": "while 1: pass"}, timeout_s=0.2)
        assert response.text is not None
        assert "limit of 0.2 s" in response.text
    finally:
        await tool.shutdown()


async def test_a_sandbox_that_breaks_is_a_failed_call():
    tool = await started({})
    try:
        call = asyncio.create_task(tool.execute("i", {"code": "while True: pass"}))
        await asyncio.sleep(0.2)
        for pid in processes_below(os.getpid()):
            with suppress(ProcessLookupError):  # they take each other along
                os.kill(pid, 9)
        with pytest.raises(WorkerLostError, match="The sandbox was lost"):
            await call
    finally:
        await tool.shutdown()


async def test_a_machine_without_bubblewrap_is_told_at_the_start(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxUnavailableError, match="apt-get install -y bubblewrap"):
        await PythonSandboxTool({}, None).startup()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"statefull": True}, "unknown key 'statefull'"),
        ({"stateful": "yes"}, "stateful must be true or false, got 'yes'"),
    ],
)
def test_a_wrong_config_is_told(config, message):
    with pytest.raises(ValueError, match=message):
        PythonSandboxTool(config, None)


def test_keys_of_the_gate_and_empty_ones_are_no_mistakes():
    config = {
        "type": "native",
        "max_concurrency": 8,
        "num_workers": 4,
        "stateful": None,
        "python": None,
    }
    tool = PythonSandboxTool(config, None)
    assert tool.name == "code_interpreter"
    assert tool.config["timeout_s"] == 40.0  # the gate's: longer than a program may take
    description = PythonSandboxTool({"stateful": True}, None).tool_schema["function"]["description"]
    assert description.endswith("Variables and files stay for the next call.")
