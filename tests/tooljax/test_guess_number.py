"""Games are split by range and repeatable; demonstrations follow the rules and err as asked; the config loads."""

import argparse
import json
import random
import re

import pyarrow.parquet as pq
import pytest

from rollout_sidecar.formats import get_format
from rollout_sidecar.rewards.registry import get_reward
from rollout_sidecar.tools.guess_number import SCHEMA, GuessNumberTool
from tooljax.config import load_config
from tooljax.data.prepare import guess_number
from tooljax.data.prepare.guess_number import Game, hint
from tooljax.data.records import read_tasks


def make(folder, **options):
    parser = argparse.ArgumentParser()
    guess_number.add_arguments(parser)
    options = {"train": 60, "heldout": 20, "demonstrations": 40, **options}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    guess_number.run(parser.parse_args(["--output_dir", str(folder), *arguments]))
    return folder


def ranges(questions):
    return {tuple(re.findall(r"\d+", question)) for question in questions}


def test_a_game_worked_by_hand():
    game = Game(low=10, secret=41)
    assert game.question == "My number is one of 10 to 41. Which?"
    assert [hint(41, number) for number in (40, 41, 42)] == ["higher", "correct", "lower"]


def test_all_numbers_have_two_digits_and_every_range_is_used():
    train, heldout = guess_number.split_lows(0)
    assert sorted(train + heldout) == list(range(10, 69))
    assert max(Game(low, low).high for low in train + heldout) == 99


def test_heldout_ranges_occur_in_no_training_game_and_no_demonstration(tmp_path):
    make(tmp_path, train=1504, heldout=384, demonstrations=2000)
    asked = {
        split: [
            row["prompt"][0]["content"]
            for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        ]
        for split in ("train", "heldout")
    }
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    demonstrated = ranges(json.loads(line)["messages"][0]["content"] for line in lines)
    # 59 ranges: a fifth, 12, are held out.
    assert len(ranges(asked["heldout"])) == 12
    assert len(ranges(asked["train"])) == 47
    assert not ranges(asked["heldout"]) & (ranges(asked["train"]) | demonstrated)


def test_the_default_counts_are_every_game_once():
    train, heldout = guess_number.split_lows(3)
    for lows, count in ((train, 1504), (heldout, 384)):
        games = guess_number.make_games(3, "train", lows, count)
        assert len(set(games)) == count == 32 * len(lows)
        assert guess_number.make_games(3, "train", lows, count + 2)[count:] == games[:2]


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    first, again, other = (
        make(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    name = "demonstrations.jsonl"
    assert (first / name).read_text() == (again / name).read_text()
    assert (first / name).read_text() != (other / name).read_text()
    assert pq.read_table(first / "train.parquet").equals(pq.read_table(again / "train.parquet"))


def play(game, *, halving=0.0, error=0.0, early=0.0):
    """Demonstrations of it, each as (guesses, hints, answer)."""
    shares = {"halving_share": halving, "error_share": error, "early_share": early}
    rng, hermes = random.Random(0), get_format("hermes")
    for _ in range(400):
        shown = guess_number.make_demonstration(rng, game, **shares)
        _, *turns, last = shown["messages"]
        assert [message["role"] for message in turns] == ["assistant", "tool"] * (len(turns) // 2)
        calls = [hermes.parse(message["content"])[0] for message in turns[::2]]
        guesses = [(call.arguments or {})["number"] for call in calls]
        assert [call.name for call in calls] == ["guess"] * len(calls)
        assert last["content"].startswith("#### ")
        answer = int(last["content"].removeprefix("#### "))
        yield guesses, [message["content"] for message in turns[1::2]], answer


def test_demonstrations_without_mistakes_guess_only_what_is_possible():
    game = Game(low=20, secret=45)
    for guesses, hints, answer in play(game):
        assert len(guesses) <= 5
        assert hints == [hint(45, number) for number in guesses]
        possible = set(range(20, 52))
        for number, told in zip(guesses, hints, strict=True):
            assert number in possible
            possible = {n for n in possible if hint(n, number) == told}
        assert answer in possible
        assert len(guesses) == 5 or hints[-1] == "correct"


def test_halving_a_range_worked_by_hand():
    # 20 to 51: 35, then 36 to 51: 43, 44 to 51: 47, 44 to 46: 45.
    for guesses, hints, answer in play(Game(low=20, secret=45), halving=1):
        assert guesses == [35, 43, 47, 45]
        assert hints == ["higher", "higher", "lower", "correct"]
        assert answer == 45


def test_halving_finds_every_number_in_six_guesses():
    for secret in range(20, 52):
        _, _, answer = next(play(Game(low=20, secret=secret), halving=1))
        assert answer == secret


def test_mistakes_have_the_shares_asked_for():
    game = Game(low=20, secret=45)
    # Answers without a guess: three standard deviations around 100 of 400.
    at_once = sum(not guesses for guesses, _, _ in play(game, early=0.25))
    assert abs(at_once - 100) < 26
    # Told that 45 is higher than the first guess, guesses at or below it come from mistakes alone.
    second = [guesses[:2] for guesses, _, _ in play(game, error=1) if guesses[0] < 45]
    below = sum(b <= a for a, b in second)
    expected = sum(a - 19 for a, _ in second) / 32
    assert abs(below - expected) < 3 * (len(second) / 4) ** 0.5


async def test_the_tool_says_what_demonstrations_have_it_say():
    tool = GuessNumberTool({}, None)
    assert guess_number.GUESS_SCHEMA == SCHEMA
    for i, (guesses, hints, _) in enumerate(play(Game(low=20, secret=45), error=0.5)):
        await tool.create(str(i), secret=45, max_guesses=guess_number.MAX_GUESSES)
        told = [(await tool.execute(str(i), {"number": n}))[0].text for n in guesses]
        assert told == hints


def test_records_are_scored_by_the_answer(tmp_path):
    task = read_tasks([str(make(tmp_path) / "train.parquet")], max_rows=1)[0]
    score = get_reward("", task.data_source)
    secret = task.tools_kwargs["guess"]["create_kwargs"]["secret"]
    for answer, expected in ((secret, 1.0), (secret + 1, 0.0)):
        given = score(task.data_source, f"#### {answer}", task.ground_truth)
        assert given["score"] == expected


def test_fewer_than_one_game_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--heldout 0: it takes at least one"):
        make(tmp_path, heldout=0)


def test_the_config_gives_a_turn_for_each_guess_and_one_for_the_answer():
    config = load_config(["configs/guess_number.gin"], [])
    assert config.limits.max_turns == guess_number.MAX_GUESSES + 1
    assert config.run.steps == 20
