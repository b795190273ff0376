import asyncio
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import JSON, MSGPACK, encode
from rollout_sidecar.rewards import gsm8k, registry
from rollout_sidecar.rewards.base import Score, compute
from rollout_sidecar.rewards.registry import accepted_kwargs, check_reward, get_reward
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", 1.0),
        ("Between 1 and 50, it is $42!", 1.0),
        ("50-8=42", 1.0),
        ("#### 41, no: 42", 1.0),
        ("It was 42, I said 41", 0.0),
        ("-42", 0.0),
        ("none", 0.0),
    ],
)
def test_flexible_reads_the_last_number(text: str, expected: float):
    assert gsm8k_score(text, "42", method="flexible") == expected


@pytest.mark.parametrize(
    ("text", "truth", "method", "expected"),
    [
        ("#### 1,234", "1234", "strict", 1.0),
        ("#### 42.0", "42", "strict", 0.1),  # compared as text
        ("####42", "42", "strict", 0.0),  # exactly one space
        ("#### $42", "42", "strict", 0.0),
        ("#### 42 * 3", "42", "strict", 1.0),  # its first digits
        ("#### 42" + "." * 301, "42", "strict", 0.0),  # too far from the end
        ("it is 42 . ", "42", "flexible", 1.0),
        ("it is 42.", "42", "flexible", 0.1),  # the full stop belongs to it
        ("1,234", "1234", "flexible", 0.1),
        ("none", "42", "flexible", 0.0),
    ],
)
def test_verls_own_reading(text: str, truth: str, method: str, expected: float):
    options = {"method": method, "format_score": 0.1, "verl_identical": True}
    assert gsm8k_score(text, truth, **options) == expected


def test_the_method_must_be_known():
    with pytest.raises(ValueError, match='method=\'loose\' must be "strict" or "flexible"'):
        gsm8k_score("#### 1", "1", method="loose")


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
    # What functions write for verl, which wants the same keys in every row.
    filled = {"score": 0, "other": 2, "acc": float("nan"), "style": None}
    assert (await score(filled)).metrics == {"other": 2.0}


class Odd:
    """Cannot be read or shown."""

    def item(self):
        raise RuntimeError("no number")

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = object.__repr__


@pytest.mark.parametrize("odd", [np.array([1, 2]), 10**400, "text", [1], 1j, Odd()])
async def test_a_metric_that_is_no_number_costs_only_itself(odd):
    answer = {"score": 0.5, "odd": odd, "acc": np.array(1)}
    assert await score(answer) == Score(0.5, {"outcome": 0.5}, {"acc": 1.0})


async def test_names_of_metrics_become_text_that_can_be_sent():
    """Else a key costs the request of every trajectory."""
    answer = {"score": 1.0, 1: 2.0, None: 3.0, "\ud800x": 4.0, (1, "a"): 5.0, Odd(): 6.0}
    metrics = (await score(answer)).metrics
    assert metrics == {"1": 2.0, "None": 3.0, "?x": 4.0, "(1, 'a')": 5.0}
    assert encode(metrics, MSGPACK)
    assert encode(metrics, JSON)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (float("nan"), "returned score = nan, expected a finite number"),
        ({"score": float("inf")}, "returned score = inf"),
        ({"acc": 1}, r"returned keys \['acc'\], but no \"score\""),
        ({1: 2.0, None: 1, "b": 3}, r"returned keys \['b', 1, None\], but no \"score\""),
        ({"score": "1"}, "expected a number or a dict"),
        ({"score": 10**400}, "expected a number or a dict"),
        (np.array([1.0, 2.0]), "expected a number or a dict"),
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


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("tooljax/arithmetic", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("numina_olympiads", "math"),
        ("math_dapo", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("aime_2024", "math_dapo"),
        *((f"searchR1_{name}", "search_qa") for name in ("nq", "triviaqa", "popqa", "hotpotqa")),
        *(
            (f"searchR1_{name}", "search_qa")
            for name in ("2wikimultihopqa", "musique", "bamboogle")
        ),
        *((name, "code") for name in ("codecontests", "apps", "codeforces", "taco")),
    ],
)
def test_data_sources_are_routed_as_in_verl(source: str, name: str):
    assert get_reward("", source) is get_reward(name)


def test_rewards_can_be_added(monkeypatch):
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))
    monkeypatch.setattr(registry, "_BY_DATA_SOURCE", dict(registry._BY_DATA_SOURCE))

    def mine(**arguments):
        return 1.0

    registry.register("mine", mine, data_sources=["my/data", "aime_mine*"])
    assert get_reward("mine") is get_reward("", "my/data") is get_reward("", "aime_mine_1") is mine
    assert get_reward("", "aime_2024") is get_reward("math_dapo")


def test_a_file_alone_means_its_compute_score(tmp_path: Path):
    (tmp_path / "reward.py").write_text("def compute_score(**arguments): return 1.0\n")
    function = get_reward(f"{tmp_path}/reward.py")
    assert function is get_reward(f"{tmp_path}/reward.py:compute_score")


async def test_files_written_for_verl_find_its_names(tmp_path: Path):
    file = tmp_path / "for_verl.py"
    file.write_text(
        "from verl.utils.reward_score import gsm8k\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return gsm8k.compute_score(solution_str, ground_truth, format_score=0.25)\n"
    )
    answer = await compute(
        get_reward(str(file)), data_source="d", solution_str="#### 41", ground_truth="42"
    )
    assert answer.reward == 0.25


def test_arguments_that_nobody_takes_end_the_start(tmp_path: Path):
    check_reward("", {"format_score": 0.1, "measure": "f1"})
    check_reward("gsm8k", {"format_score": 0.1})
    with pytest.raises(
        ValueError,
        match=r"'format_scor' is not known; the reward 'gsm8k' takes: format_score, method, .*"
        r"Did you mean 'format_score'\?",
    ):
        check_reward("gsm8k", {"format_scor": 0.1})
    with pytest.raises(ValueError, match="'bonus' is not known; built-in rewards take: all_or_no"):
        check_reward("", {"bonus": 1})
    file = tmp_path / "reward.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info, bonus=0): pass\n")
    check_reward(f"{file}:f", {"bonus": 1})
    with pytest.raises(ValueError, match="'bonuses' is not known; .* Did you mean 'bonus'"):
        check_reward(f"{file}:f", {"bonuses": 1})
    file.write_text("def g(**anything): pass\n")


def test_by_data_source_each_function_gets_the_arguments_that_it_takes():
    kwargs = {"format_score": 0.1, "measure": "f1"}
    assert accepted_kwargs("", get_reward("gsm8k"), kwargs) == {"format_score": 0.1}
    assert accepted_kwargs("", get_reward("search_qa"), kwargs) == kwargs
    assert accepted_kwargs("gsm8k", get_reward("gsm8k"), kwargs) == kwargs
    assert accepted_kwargs("", lambda **anything: 1.0, kwargs) == kwargs


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
        ("gsm9k", "", "unknown reward 'gsm9k'; there are: code, gsm8k, .*math, .* or give path"),
        ("FOLDER/none.py:f", "", r"reward: .*none\.py: no such file"),
        ("FOLDER/reward.py", "", "has no function 'compute_score'; it has: g"),
        ("FOLDER/reward.txt:f", "", "unknown reward"),
        ("FOLDER/reward.py:f", "", "has no function 'f'; it has: g"),
        ("FOLDER/broken.py:f", "", r"broken\.py could not be loaded: ZeroDivisionError"),
    ],
)
def test_errors_name_what_was_asked(tmp_path: Path, name: str, source: str, message: str):
    (tmp_path / "reward.py").write_text("def g(): pass\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=message):
        get_reward(name.replace("FOLDER", str(tmp_path)), source)
