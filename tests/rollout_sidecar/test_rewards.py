import asyncio
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.formats import get_format
from rollout_sidecar.rewards import gsm8k
from rollout_sidecar.rewards.base import Score, compute
from rollout_sidecar.rewards.registry import get_reward
from rollout_sidecar.tokenizer import ChatTokenizer


def gsm8k_score(text: str, truth, **options) -> float:
    return gsm8k.compute_score("openai/gsm8k", text, truth, {}, **options)["score"]


async def score(answer) -> Score:
    return await compute(
        lambda **arguments: answer, data_source="d", solution_str="s", ground_truth="g"
    )


# --- gsm8k ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("#### 42", "42"),
        ("so\n####42.", "42"),
        ("#### $1,234.50", "1234.5"),
        ("#### -7", -7),
        ("#### -$7", "-7"),
        ("#### 3/4", 0.75),
        ("#### 42 apples", "42"),
        ("#### 42<|im_end|>", "42"),
        ("#### 1 #### 2", "2"),
        ("#### 42.00", "42"),
        ("#### .5", "0.5"),
        ("#### 1000", "1,000"),
    ],
)
def test_right_answers(text: str, truth):
    assert gsm8k_score(text, truth) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "The answer is 42.",
        "### 42",
        "#### forty-two",
        "#### 41",
        "#### 42 #### 41",
        "#### 4,2",
        "#### 42.5",
        "#### 42.0.0",
        "#### 42/2",
        "#### 42 * 2",
        "#### 42e1",
        "#### 421",
        "#### -42",
        "",
    ],
)
def test_wrong_answers(text: str):
    assert gsm8k_score(text, "42") == 0.0


def test_terms_of_the_answer():
    assert gsm8k.compute_score("d", "#### 41", "42", None, format_score=0.1) == {
        "score": 0.1,
        "acc": 0.0,
        "answered": 1.0,
    }
    assert gsm8k_score("41", "42", format_score=0.1) == 0.0
    assert gsm8k_score("#### 42", "42", format_score=0.1) == 1.0


def test_ground_truth_must_be_a_number():
    with pytest.raises(ValueError, match="the ground truth 'many' is not a number"):
        gsm8k_score("#### 1", "many")


@pytest.mark.parametrize("value", ["0", "7", "-12", "999", "1000", "1234567", "1234.25", "-0.125"])
def test_every_way_to_write_a_number_counts(value: str):
    grouped = f"{Decimal(value):,}"
    for written in (value, grouped, f"${grouped}", f" {grouped}.", f"{grouped}\n", f"{grouped}!"):
        assert gsm8k_score(f"#### {written}", value) == 1.0, written
        assert gsm8k_score(f"#### {value}", grouped) == 1.0


@pytest.mark.parametrize(
    ("own_text", "model_score", "full_score"),
    [("I don't know", 0.0, 1.0), ("#### 42", 1.0, 1.0)],
)
def test_tool_output_earns_no_reward(
    tiny_tokenizer: ChatTokenizer, own_text: str, model_score: float, full_score: float
):
    conversation = Conversation(
        tiny_tokenizer, get_format("hermes"), [{"role": "user", "content": "6 * 7?"}]
    )
    ids = tiny_tokenizer.encode("I call a tool.<|im_end|>")
    conversation.append_completion(ids, [0.0] * len(ids), 0)
    result = [{"role": "tool", "content": "#### 42"}]
    conversation.append_observation(result, conversation.render_observation(result))
    ids = tiny_tokenizer.encode(own_text)
    conversation.append_completion(ids, [0.0] * len(ids), 0)
    assert gsm8k_score(conversation.model_text(), "42") == model_score
    # What verl would score.
    assert gsm8k_score(conversation.full_text(), "42") == full_score


# --- compute ----------------------------------------------------------------------------------------------------


async def test_a_number_is_the_reward_and_the_accuracy():
    assert await score(0.5) == Score(0.5, {"outcome": 0.5}, {"acc": 0.5})
    assert await score(True) == Score(1.0, {"outcome": 1.0}, {"acc": 1.0})
    assert await score(np.float32(0.5)) == Score(0.5, {"outcome": 0.5}, {"acc": 0.5})


async def test_numbers_of_a_dict_are_metrics_and_may_differ_from_row_to_row():
    assert await score({"score": 1, "acc": True, "pred": "42", "n": np.int64(3)}) == Score(
        1.0, {"outcome": 1.0}, {"acc": 1.0, "n": 3.0}
    )
    assert await score({"score": 0, "other": 2}) == Score(0.0, {"outcome": 0.0}, {"other": 2.0})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (float("nan"), "returned score = nan, expected a finite number"),
        ({"score": float("inf")}, "returned score = inf"),
        ({"score": 1, "acc": float("nan")}, "returned acc = nan"),
        ({"acc": 1}, r"returned keys \['acc'\], but no \"score\""),
        ({"score": "1"}, "expected a number or a dict"),
        (None, "returned None, expected a number or a dict"),
        ("1.0", "returned '1.0', expected a number or a dict"),
    ],
)
async def test_bad_answers_are_errors(answer, message: str):
    with pytest.raises(ValueError, match=message):
        await score(answer)


async def test_functions_see_verls_arguments():
    seen = []

    async def function(data_source, solution_str, ground_truth, extra_info, **kwargs):
        seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return 1.0

    await compute(
        function,
        data_source="d",
        solution_str="s",
        ground_truth=[1],
        extra_info={"index": 3},
        more=5,
    )
    assert seen == [("d", "s", [1], {"index": 3}, {"more": 5})]


async def test_a_function_that_blocks_does_not_hold_up_others():
    arrived = threading.Barrier(3)

    def blocks(**arguments):
        arrived.wait(timeout=30)  # fails unless three run at once
        return 1.0

    def run():
        return compute(blocks, data_source="d", solution_str="s", ground_truth="g")

    scores = await asyncio.gather(run(), run(), run())
    assert [score.reward for score in scores] == [1.0] * 3


# --- registry ---------------------------------------------------------------------------------------------------


def test_built_in_rewards():
    assert get_reward("gsm8k", "anything") is gsm8k.compute_score
    assert get_reward("", "openai/gsm8k") is gsm8k.compute_score
    assert get_reward("", "tooljax/arithmetic") is gsm8k.compute_score


async def test_functions_in_files_sync_and_async(tmp_path: Path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def plain(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str == ground_truth)\n"
        "async def later(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 2.0}\n"
    )
    for name, expected in (("plain", 1.0), ("later", 2.0)):
        function = get_reward(f"{file}:{name}")
        assert get_reward(f"{file}:{name}") is function
        answer = await compute(function, data_source="d", solution_str="a", ground_truth="a")
        assert answer.reward == expected


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("", "mine", "no built-in reward for data_source 'mine' .*path/to/file.py:function"),
        ("gsm9k", "", "unknown reward 'gsm9k'; there are: gsm8k, or give path"),
        ("FOLDER/none.py:f", "", r"none\.py: no such reward file"),
        ("FOLDER/reward.py", "", "unknown reward"),
        ("FOLDER/reward.py:f", "", "has no function 'f'; it has: g"),
        ("FOLDER/broken.py:f", "", r"broken\.py could not be loaded: ZeroDivisionError"),
    ],
)
def test_errors_name_what_was_asked(tmp_path: Path, name: str, source: str, message: str):
    (tmp_path / "reward.py").write_text("def g(): pass\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=message):
        get_reward(name.replace("FOLDER", str(tmp_path)), source)
