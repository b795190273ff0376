"""verl's gsm8k tool: texts, step rewards, the reward of the trajectory."""

import pytest

from rollout_sidecar.tools.base import ToolFailure
from rollout_sidecar.tools.gsm8k import Gsm8kTool


async def submit(tool, instance, answer):
    response, reward, metrics = await tool.execute(instance, {"answer": answer})
    assert metrics == {}
    return response.text, reward


async def test_each_submission_that_does_not_improve_costs():
    tool = Gsm8kTool({"type": "native"}, None)
    instance, greeting = await tool.create("i", ground_truth="72")
    assert (instance, greeting.is_empty()) == ("i", True)
    assert await tool.calc_reward(instance) == 0.0
    # Scores 0, 1, 1, 0, 1: better than the one before only at the second and the last.
    for answer, reward, step in (
        ("70", 0.0, -0.05),
        ("72", 1.0, 0.0),
        ("#### 72", 1.0, -0.05),
        ("no idea", 0.0, -0.05),
        ("it is 72", 1.0, 0.0),
    ):
        text = f"Current parsed answer='{answer}' reward={reward}"
        assert await submit(tool, instance, answer) == (text, step)
        assert await tool.calc_reward(instance) == reward


async def test_instances_are_apart_and_released():
    tool = Gsm8kTool({}, None)
    for name, truth in (("a", "1"), ("b", "2")):
        await tool.create(name, create_kwargs={"ground_truth": truth})
    await submit(tool, "a", "1")
    await submit(tool, "b", "1")
    assert (await tool.calc_reward("a"), await tool.calc_reward("b")) == (1.0, 0.0)
    await tool.release("a")
    await tool.release("a")
    with pytest.raises(KeyError):
        await tool.calc_reward("a")


@pytest.mark.parametrize(
    ("config", "rewards"),
    [({}, [1.0, 1.0, 1.0]), ({"verl_identical": True}, [1.0, 0.0, 0.0])],
)
async def test_numbers_are_compared_by_value_unless_as_verl_does(config, rewards):
    tool = Gsm8kTool(config, None)
    await tool.create("i", ground_truth="1000")
    seen = []
    for answer in ("1000", "1,000", "1000.0"):
        await submit(tool, "i", answer)
        seen.append(await tool.calc_reward("i"))
    assert seen == rewards


async def test_a_task_without_truth_is_told():
    tool = Gsm8kTool({}, None)
    await tool.create("i")
    with pytest.raises(ToolFailure, match="no ground_truth in its create_kwargs"):
        await tool.execute("i", {"answer": "1"})
    assert await tool.calc_reward("i") == 0.0
