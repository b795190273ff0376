"""Whose code runs where: users' on the loop of their package, ours on the server's."""

import asyncio
import contextvars
import functools
import threading
from typing import Any

import pytest
from sandbox_cases import needs_bubblewrap
from sidecar_cases import CounterTool, call, make_agent, play, serving, statuses, tool_messages

from rollout_sidecar.foreign import bounded, invoke
from rollout_sidecar.foreign_loops import owner_of
from rollout_sidecar.rewards import gsm8k
from rollout_sidecar.tools.calculator import CalculatorTool
from rollout_sidecar.tools.function_tool import FunctionTool
from rollout_sidecar.tools.python_sandbox.tool import PythonSandboxTool

OWN = __name__.partition(".")[0]


async def where() -> int:
    """The thread that runs it."""
    return threading.get_ident()


class Placed(CounterTool):
    """Notes the thread of every method."""

    def __init__(self):
        super().__init__()
        self.threads: dict[str, int] = {}

    def note(self, method, instance_id, kwargs):
        self.threads[method] = threading.get_ident()

    async def startup(self):
        self.threads["startup"] = threading.get_ident()

    async def answer(self, instance_id, parameters):
        return "ok"


async def test_all_methods_of_a_tool_share_one_loop_with_the_rest_of_its_package(tiny_tokenizer):
    tool = Placed()
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], tool)
    async with serving(agent):
        await play(agent)
    assert set(tool.threads) == {"startup", "create", "execute", "calc_reward", "release"}
    assert set(tool.threads.values()) == {await invoke(where)}
    assert threading.get_ident() not in tool.threads.values()


def test_who_owns_what():
    class Mine(CalculatorTool):
        pass

    class Callable:
        async def __call__(self): ...

    ours = CalculatorTool({}, None)
    assert owner_of(ours.execute) == owner_of(gsm8k.compute_score) == ""
    assert owner_of(Mine({}, None).execute) == OWN
    assert owner_of(Mine({}, None).calc_reward) == ""  # BaseTool's own: it does nothing
    assert owner_of(where) == owner_of(functools.partial(where)) == owner_of(Callable()) == OWN
    assert owner_of(FunctionTool(where).execute) == ""  # it calls `where` on that one's loop
    assert owner_of(len) == "builtins"


async def test_function_tools_run_on_their_functions_loop(tiny_tokenizer):
    async def place() -> str:
        """Where it runs."""
        return str(threading.get_ident())

    agent = make_agent(tiny_tokenizer, [call("place"), "#### 2"], FunctionTool(place))
    assert tool_messages(await play(agent)) == [str(await invoke(where))]


async def test_a_plain_function_may_return_a_coroutine():
    assert await bounded(invoke(lambda: where()), 5.0) == await invoke(where)


async def test_a_users_python_tool_and_ours_each_have_a_sandbox(tiny_tokenizer):
    """A pool of workers serves one loop; these have the same options, and different loops."""
    needs_bubblewrap()

    class Mine(PythonSandboxTool):
        def get_openai_tool_schema(self):
            schema = super().get_openai_tool_schema()
            return {**schema, "function": {**schema["function"], "name": "mine"}}

    options = {"workers": 1}
    tools = [Mine(options, None), PythonSandboxTool(options, None)]
    script = ["".join(call(tool.name, code="print(7)") for tool in tools), "#### 2"]
    agent = make_agent(tiny_tokenizer, script, *tools)
    async with serving(agent):
        trajectory = await play(agent)
    assert statuses(trajectory) == [["ok", "ok"], []]
    assert tool_messages(trajectory) == ["7", "7"]


async def test_a_users_subclass_of_an_mcp_tool_shares_the_sessions_of_the_rest(
    tiny_tokenizer, tmp_path
):
    """They live in the server's loop."""
    pytest.importorskip("mcp")
    from mcp_cases import McpTool, assert_nothing_left, entry, open_mcp_tools, play_all, raw

    threads = []

    class Mine(McpTool):
        async def execute(self, instance_id, parameters, **kwargs):
            threads.append(threading.get_ident())
            return await super().execute(instance_id, parameters, **kwargs)

    made = {**entry(tmp_path, {"raw": raw()}), "class_name": Mine}
    made["mcp"]["tool_selected_list"] = ["inc"]
    tools: Any = await open_mcp_tools(made, where="tools[0]", base_dir=tmp_path)
    for tool in tools.values():
        await invoke(tool.startup)
    script = [call("inc"), call("inc"), "#### 2"]
    for trajectory in await play_all(tiny_tokenizer, tools, [script] * 2):
        assert tool_messages(trajectory) == ["1", "2"]
    for tool in tools.values():
        await invoke(tool.shutdown)
    assert set(threads) == {await invoke(where)}
    assert_nothing_left()


async def test_context_variables_are_passed_on():
    trace = contextvars.ContextVar("trace", default="")
    trace.set("r:0")

    async def read():
        return trace.get()

    assert await invoke(read) == "r:0"


async def test_users_code_may_use_threads_of_its_own_loop():
    async def work():
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    assert await bounded(invoke(work), 5.0) == "foreign"
