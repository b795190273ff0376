"""The GSM8K user, as documented for verl: it says whether an answer is right, and asks to try again."""

from typing import Any

from sidecar_cases import make_agent, make_task, play

from rollout_sidecar.interactions.gsm8k import CORRECT, INCORRECT, Gsm8kInteraction


def agent_of(tokenizer, script):
    agent = make_agent(tokenizer, script)
    agent.interactions = {"gsm8k": Gsm8kInteraction({"name": "gsm8k"})}
    return agent


def task_of(**kwargs: Any):
    return make_task(interaction="gsm8k", interaction_kwargs={"name": "gsm8k", **kwargs})


async def test_the_gsm8k_user_asks_again_until_the_answer_is_right(tiny_tokenizer):
    script = ["I think 2.", "#### 3", "So: #### 2.0"]
    agent = agent_of(tiny_tokenizer, script)
    trajectory = await play(agent, task_of(ground_truth="2", query="Count to two."))
    assert trajectory.status == "completed"
    replies = [turn.reply for turn in trajectory.turns]
    assert [(r.text, r.score, r.done) for r in replies if r] == [
        (INCORRECT, 0.0, False),
        (INCORRECT, 0.0, False),
        (CORRECT, 1.0, True),
    ]
    assert trajectory.metrics["interaction_score"] == 1.0
    assert (CORRECT, INCORRECT) == (
        "Your response is correct!",
        "Your response is incorrect! You need to reflect on your answer and try again.",
    )


async def test_a_gsm8k_task_without_an_answer_is_an_interaction_error(tiny_tokenizer):
    agent = agent_of(tiny_tokenizer, ["#### 2"])
    trajectory = await play(agent, task_of(query="?"))
    assert trajectory.status == "interaction_error"
    assert trajectory.error.endswith("interaction_kwargs has no ground_truth")
    assert trajectory.turns == []
