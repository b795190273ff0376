"""verl's stock files, unchanged: tool_config, MCP JSON, interactions, records, from the file to a scored trajectory."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestServer
from servers_sandbox_fusion import SandboxFusionServer
from sidecar_cases import call, play, statuses, tool_messages

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.interactions.registry import load_interactions
from rollout_sidecar.profiles import PROFILES, ProfileName
from rollout_sidecar.protocol import Task
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.tools.bm25 import make_app
from rollout_sidecar.tools.bm25_index import open_index
from rollout_sidecar.tools.registry import open_tools
from tooljax.data.records import read_tasks

STOCK = Path(__file__).parents[1] / "data" / "verl"
MCP_SERVER = Path(__file__).parent / "mcp_servers" / "sdk_server.py"

PROFILE_NAMES: list[ProfileName] = ["default", "A", "B", "C"]


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stock files as the working folder, its records as Parquet."""
    folder = tmp_path / "verl"
    shutil.copytree(STOCK, folder)
    for rows in folder.glob("*_rows.json"):
        table = pa.Table.from_pylist(json.loads(rows.read_text()))
        pq.write_table(table, rows.with_suffix(".parquet"))
    monkeypatch.chdir(folder)
    return folder


def move(file: str, old: str, new: str) -> None:
    """Puts a server's address into a stock file, which is all that a user would change."""
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


@asynccontextmanager
async def agent_of(
    tokenizer,
    script: Sequence[str],
    *tools: str,
    interactions: str = "",
    reward: str = "",
    profile: ProfileName = "default",
) -> AsyncIterator[Agent]:
    """An agent with the tools of these files, started and stopped as a sidecar does."""
    agent = Agent(
        engine=ScriptedEngine(tokenizer, script),
        tokenizer=tokenizer,
        tool_format=get_format("hermes"),
        tools=await open_tools(tools, profile=profile),
        interactions=load_interactions(interactions) if interactions else {},
        scorer=Scorer(reward=reward),
        profile=PROFILES[profile],
    )
    for tool in agent.tools.values():
        await tool.startup()
    try:
        yield agent
    finally:
        for tool in agent.tools.values():
            await tool.shutdown()


def task_of(file: str) -> Task:
    """The first task of a file."""
    return read_tasks([file])[0]


# --- tools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILE_NAMES)
async def test_gsm8k(stock, tiny_tokenizer, profile):
    script = [
        call("calc_gsm8k_reward", answer="17"),
        call("calc_gsm8k_reward", answer="18"),
        "#### 18",
    ]
    async with agent_of(tiny_tokenizer, script, "gsm8k_tool_config.yaml", profile=profile) as agent:
        trajectory = await play(agent, task_of("gsm8k_rows.parquet"))
        assert agent.leases.live == 0
    assert trajectory.status == "completed"
    assert statuses(trajectory) == [["ok"], ["ok"], []]
    wrong, right = tool_messages(trajectory)
    assert "reward=0.0" in wrong
    assert "reward=1.0" in right
    assert trajectory.reward_terms == {"outcome": 1.0}
    # calc_reward, the score of the last submission, is verl's in A only; without it there are the two calls' rewards.
    calls = -0.05 + 0.0
    final = 1.0 if PROFILES[profile].tool_lifetime == "trajectory" else 0.0
    assert trajectory.metrics["tool_reward/calc_gsm8k_reward"] == pytest.approx(calls + final)


def schemas_in_prompt(tokenizer, trajectory) -> list[Any]:
    """What stands between <tools> and </tools>."""
    text = tokenizer.decode(trajectory.token_ids[: trajectory.prompt_tokens])
    lines = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    return [json.loads(line) for line in lines]


async def test_search(stock, tiny_tokenizer, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"Paris"\nThe capital of France.'}) + "\n")
    script = [call("search", query_list=["capital of France"]), "<answer>Paris</answer>"]
    async with TestServer(make_app(open_index(corpus)), host="127.0.0.1") as server:
        url = str(server.make_url("/retrieve"))
        move("search_tool_config.yaml", "http://127.0.0.1:8000/retrieve", url)
        async with agent_of(tiny_tokenizer, script, "search_tool_config.yaml") as agent:
            trajectory = await play(agent, task_of("search_rows.parquet"))
    assert json.loads(tool_messages(trajectory)[0]) == {
        "result": 'Doc 1 (Title: "Paris")\nThe capital of France.'
    }
    assert trajectory.reward == 1.0
    # The shipped file's slip of the pen reaches the prompt as it is.
    (schema,) = schemas_in_prompt(tiny_tokenizer, trajectory)
    assert schema["function"]["parameters"]["properties"]["query_list"]["item"] == {
        "type": "string"
    }


async def test_sandbox_fusion(stock, tiny_tokenizer):
    script = [
        call("code_interpreter", code="print(6 * 7)"),
        call("code_interpreter", code="1 / 0"),
        "#### 42",
    ]
    async with SandboxFusionServer() as server:
        move(
            "sandbox_fusion_tool_config.yaml",
            "http://127.0.0.1:8080/run_code",
            f"{server.url}/run_code",
        )
        async with agent_of(tiny_tokenizer, script, "sandbox_fusion_tool_config.yaml") as agent:
            trajectory = await play(agent, task_of("sandbox_fusion_rows.parquet"))
        assert server.requests[0]["run_timeout"] == 30
        assert server.requests[0]["memory_limit_MB"] == 1024
    assert trajectory.reward == 1.0
    right, wrong = tool_messages(trajectory)
    assert right.strip() == "42"
    assert "ZeroDivisionError" in wrong


@asynccontextmanager
async def mcp_server() -> AsyncIterator[int]:
    """A server of the official SDK in a process of its own: its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(MCP_SERVER), "http", "0", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize("profile", ["default", "B"])
async def test_mcp(stock, tiny_tokenizer, profile):
    """Pain point 14: the server's state lasts for a trajectory, and belongs to it alone."""
    async with mcp_server() as port:
        move("mcp_server.json", "http://127.0.0.1:8001", f"http://127.0.0.1:{port}")
        script = [call("inc"), call("inc"), "#### 2"]
        async with agent_of(
            tiny_tokenizer, script, "mcp_tool_config.yaml", profile=profile
        ) as agent:
            task = task_of("mcp_rows.parquet")
            first = await play(agent, task)
            second = await play(agent, task)
    assert list(agent.tools) == ["inc"]  # the others were not selected
    # In verl's own generation each call has a session of its own.
    counts = ["1", "2"] if profile == "default" else ["1", "1"]
    assert [tool_messages(first), tool_messages(second)] == [counts, counts]
    assert first.reward == 1.0


async def test_two_files_and_function_tools_at_once(stock, tiny_tokenizer):
    script = [call("add", a=1, b=1) + call("say_twice", text="x"), "#### 18"]
    files = ("gsm8k_tool_config.yaml", "function_tools.py")
    async with agent_of(tiny_tokenizer, script, *files) as agent:
        trajectory = await play(agent, task_of("gsm8k_rows.parquet"))
    assert list(agent.tools) == ["calc_gsm8k_reward", "add", "say_twice"]
    assert tool_messages(trajectory) == ["2", '{"text": "x x"}']
    assert trajectory.metrics["tool_reward/say_twice"] == 0.5
    names = [schema["function"]["name"] for schema in schemas_in_prompt(tiny_tokenizer, trajectory)]
    assert names == list(agent.tools)


async def test_profile_a_offers_the_tools_that_a_row_names(stock, tiny_tokenizer):
    files = ("gsm8k_tool_config.yaml", "function_tools.py")
    async with agent_of(tiny_tokenizer, ["#### 18"], *files, profile="A") as agent:
        trajectory = await play(agent, task_of("gsm8k_rows.parquet"))
    (schema,) = schemas_in_prompt(tiny_tokenizer, trajectory)
    assert schema["function"]["name"] == "calc_gsm8k_reward"
    assert schema["function"]["parameters"]["properties"]["answer"]["enum"] is None


# --- interactions and rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILE_NAMES)
async def test_interaction(stock, tiny_tokenizer, profile):
    async with agent_of(
        tiny_tokenizer,
        ["#### 17", "#### 18"],
        interactions="gsm8k_interaction_config.yaml",
        profile=profile,
    ) as agent:
        trajectory = await play(agent, task_of("interaction_rows.parquet"))
        assert agent.leases.live == 0
    assert (trajectory.status, trajectory.reward) == ("completed", 1.0)
    assert [turn.reply and turn.reply.score for turn in trajectory.turns] == [0.0, 1.0]
    said = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert len(said) == (3 if PROFILES[profile].last_user_message else 2)
    assert "incorrect" in said[1]
    assert not any(trajectory.loss_mask[trajectory.turns[0].end : trajectory.turns[1].start])


@pytest.mark.parametrize(("called", "reward"), [(True, 1.1), (False, 1.0)])
async def test_a_reward_function_of_the_users(stock, tiny_tokenizer, called, reward):
    script = [*([call("calc_gsm8k_reward", answer="18")] if called else []), "#### 18"]
    async with agent_of(
        tiny_tokenizer,
        script,
        "gsm8k_tool_config.yaml",
        reward="toolcall_shaping.py:compute_score",
        profile="B",
    ) as agent:
        trajectory = await play(agent, task_of("gsm8k_rows.parquet"))
    assert (trajectory.scored, trajectory.reward) == (True, pytest.approx(reward))


# --- users' own classes, in the forms of all releases ---------------------------------------------------------------

USER = '''
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class OldTool(BaseTool):
    """Of the first releases: create gives the id alone, execute a text."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._counts = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, start: int = 0, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._counts[instance_id] = start
        return instance_id

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[str, float, dict]:
        self._counts[instance_id] += parameters.get("by", 1)
        return str(self._counts[instance_id]), 0.25, {"by": parameters.get("by", 1)}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self._counts[instance_id])

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._counts[instance_id]


class NewTool(OldTool):
    """Of 0.5 and later: create takes its kwargs as one, and answers with a response."""

    async def create(self, instance_id=None, **kwargs) -> tuple[str, ToolResponse]:
        nested = kwargs.get("create_kwargs", {})
        return await super().create(instance_id, **nested), ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        text, reward, metrics = await super().execute(instance_id, parameters)
        return ToolResponse(text=text), reward, metrics


class Nagging(BaseInteraction):
    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self.ended = []

    async def start_interaction(self, instance_id: Optional[str] = None, limit: int = 1, **kwargs) -> str:
        self.left = {(instance_id := instance_id or str(uuid4())): limit}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs) -> tuple[bool, str, float, dict]:
        self.left[instance_id] -= 1
        return self.left[instance_id] < 0, "Are you sure?", 0.5, {}

    async def finalize_interaction(self, instance_id: Optional[str] = None, **kwargs) -> None:
        self.ended.append(instance_id)
'''


def user_files(module: str, tool: str) -> None:
    """Files that name a user's classes."""
    Path(f"{module}.py").write_text(USER)
    Path("mine.yaml").write_text(
        f"tools:\n  - class_name: {module}.{tool}\n    config: {{type: native}}\n    tool_schema:\n"
        "      type: function\n      function:\n        name: count\n        description: Counts.\n"
        "        parameters:\n          type: object\n"
        "          properties: {by: {type: integer, description: }}\n          required: []\n"
    )
    Path("nagging.yaml").write_text(
        f"interaction: [{{class_name: {module}.Nagging, config: {{}}}}]"
    )


@pytest.mark.parametrize(
    ("tool", "profile", "counts", "reward"),
    [
        # Two calls at 0.25 each, and calc_reward, where it is called: the count at the end.
        ("OldTool", "default", ["6", "8"], 8.5),
        ("OldTool", "A", ["6", "8"], 8.5),
        ("NewTool", "B", ["6", "7"], 0.5),
        ("NewTool", "C", ["6", "7"], 0.5),
    ],
)
async def test_a_users_classes_run_unmodified(
    stock, tiny_tokenizer, monkeypatch, tool, profile, counts, reward
):
    module = f"users_classes_{tool.lower()}_{profile.lower()}"
    user_files(module, tool)
    monkeypatch.syspath_prepend(str(stock))
    task = Task(
        task_id="t",
        messages=[{"role": "user", "content": "Count."}],
        data_source="openai/gsm8k",
        ground_truth="8",
        tools_kwargs={"count": {"create_kwargs": {"start": 5}}},
        interaction="nagging",
        interaction_kwargs={"name": "nagging", "limit": 1},
    )
    script = [call("count"), call("count", by=2), "Done?", "#### 8"]
    async with agent_of(
        tiny_tokenizer, script, "mine.yaml", interactions="nagging.yaml", profile=profile
    ) as agent:
        trajectory = await play(agent, task)
        assert agent.leases.live == 0
    assert statuses(trajectory) == [["ok"], ["ok"], [], []]
    assert tool_messages(trajectory) == counts
    assert trajectory.metrics["tool_reward/count"] == reward
    assert trajectory.turns[1].calls[0].metrics == {"by": 2.0}
    assert [turn.reply and turn.reply.done for turn in trajectory.turns] == [
        None,
        None,
        False,
        True,
    ]
    nagging: Any = agent.interactions["nagging"]
    assert len(nagging.ended) == 1
