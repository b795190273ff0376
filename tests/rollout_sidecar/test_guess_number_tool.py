"""The guessing game: hints, the bound on guesses, games apart, and what its file and a conversation make of it."""

from pathlib import Path

import pytest

from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.guess_number import MAX_GUESSES, SCHEMA, GuessNumberTool
from rollout_sidecar.tools.registry import open_tools

ROOT = Path(__file__).parents[2]


async def guess(tool, instance, number):
    response, reward, metrics = await tool.execute(instance, {"number": number})
    assert reward == 0.0
    return response.text, metrics["found"]


async def test_a_game_worked_by_hand():
    tool = GuessNumberTool({"type": "native"}, None)
    instance, greeting = await tool.create("i", create_kwargs={"secret": 42, "max_guesses": 4})
    assert (instance, greeting.is_empty()) == ("i", True)
    # 42 is above 30, below 50 and 43, and is itself; numbers outside any range are compared all the same.
    assert await guess(tool, "i", 30) == ("higher", 0.0)
    assert await guess(tool, "i", 50) == ("lower", 0.0)
    assert await guess(tool, "i", 43) == ("lower", 0.0)
    assert await guess(tool, "i", 42) == ("correct", 1.0)
    assert await tool.calc_reward("i") == 0.0


async def test_nothing_is_told_after_the_last_guess():
    tool = GuessNumberTool({}, None)
    await tool.create("i", secret=42, max_guesses=2)
    for number in (1, 2):
        assert await guess(tool, "i", number) == ("higher", 0.0)
    for number in (41, 42):
        with pytest.raises(ToolFailure, match="no guesses are left: answer"):
            await guess(tool, "i", number)


async def test_nothing_is_told_after_the_right_guess():
    tool = GuessNumberTool({}, None)
    await tool.create("i", secret=7)
    await guess(tool, "i", 7)
    with pytest.raises(ToolFailure, match="the number is found already: answer it"):
        await guess(tool, "i", 7)


async def test_a_game_has_five_guesses_unless_its_task_says_otherwise():
    tool = GuessNumberTool({}, None)
    await tool.create("i", secret=0)
    for _ in range(MAX_GUESSES):
        await guess(tool, "i", 1)
    with pytest.raises(ToolFailure, match="no guesses are left"):
        await guess(tool, "i", 1)
    await tool.create("none", secret=0, max_guesses=0)
    with pytest.raises(ToolFailure, match="no guesses are left"):
        await guess(tool, "none", 0)


async def test_games_are_apart_and_forgotten():
    tool = GuessNumberTool({}, None)
    for name, secret in (("a", 1), ("b", 9)):
        await tool.create(name, secret=secret, max_guesses=1)
    assert await guess(tool, "a", 5) == ("lower", 0.0)
    assert await guess(tool, "b", 5) == ("higher", 0.0)
    await tool.release("a")
    with pytest.raises(KeyError):
        await guess(tool, "a", 1)
    await tool.create("a", secret=2)
    assert await guess(tool, "a", 2) == ("correct", 1.0)


async def test_a_task_without_a_secret_is_refused():
    with pytest.raises(ValueError, match="the task has no secret to guess; give tools_kwargs"):
        await GuessNumberTool({}, None).create("i")


async def test_the_shipped_file_makes_the_tool_with_the_built_in_schema():
    tools = await open_tools(str(ROOT / "configs/tools/guess_number.yaml"))
    assert isinstance(tools["guess"], GuessNumberTool)
    assert tools["guess"].get_openai_tool_schema() == GuessNumberTool({}, SCHEMA).tool_schema
