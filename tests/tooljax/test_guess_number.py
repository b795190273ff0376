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
    assert game.question == "My number is one of 10 to 59. Which?"
    assert [hint(41, number) for number in (40, 41, 42)] == ["higher", "correct", "lower"]


def test_every_range_up_to_99_is_used():
    train, heldout = guess_number.split_lows(0)
    assert sorted(train + heldout) == list(range(1, 51))
    assert max(Game(low, low).high for low in train + heldout) == 99


def test_heldout_ranges_occur_in_no_training_game_and_no_demonstration(tmp_path):
    make(tmp_path, train=2000, heldout=500, demonstrations=2000)
    asked = {
        split: [
            row["prompt"][0]["content"]
            for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        ]
        for split in ("train", "heldout")
    }
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    demonstrated = ranges(json.loads(line)["messages"][0]["content"] for line in lines)
    # 50 ranges: a fifth, 10, are held out.
    assert len(ranges(asked["heldout"])) == 10
    assert len(ranges(asked["train"])) == 40
    assert not ranges(asked["heldout"]) & (ranges(asked["train"]) | demonstrated)


def test_the_default_counts_are_every_game_once():
    train, heldout = guess_number.split_lows(3)
    for lows, count in ((train, 2000), (heldout, 500)):
        games = guess_number.make_games(3, "train", lows, count)
        assert len(set(games)) == count == 50 * len(lows)
        assert guess_number.make_games(3, "train", lows, count + 2)[count:] == games[:2]


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    first, again, other = (
        make(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    name = "demonstrations.jsonl"
    assert (first / name).read_text() == (again / name).read_text()
    assert (first / name).read_text() != (other / name).read_text()
    assert pq.read_table(first / "train.parquet").equals(pq.read_table(again / "train.parquet"))


def play(game, *, halving):
    """Demonstrations of it, each as (guesses, hints, answer)."""
    rng, hermes = random.Random(0), get_format("hermes")
    for _ in range(400):
        shown = guess_number.make_demonstration(rng, game, halving_share=halving)
        _, *turns, last = shown["messages"]
        assert [message["role"] for message in turns] == ["assistant", "tool"] * (len(turns) // 2)
        calls = [hermes.parse(message["content"])[0] for message in turns[::2]]
        guesses = [(call.arguments or {})["number"] for call in calls]
        assert [call.name for call in calls] == ["guess"] * len(calls)
        assert last["content"].startswith("#### ")
        answer = int(last["content"].removeprefix("#### "))
        yield guesses, [message["content"] for message in turns[1::2]], answer


def possible_after(game, guesses, hints):
    """What the secret can be, number by number."""
    return [
        number
        for number in range(game.low, game.high + 1)
        if all(hint(number, guess) == told for guess, told in zip(guesses, hints, strict=True))
    ]


def test_demonstrations_guess_only_what_is_possible():
    game = Game(low=20, secret=45)
    for guesses, hints, answer in play(game, halving=0.3):
        assert hints == [hint(45, number) for number in guesses]
        for turn, number in enumerate([*guesses, answer]):
            assert number in possible_after(game, guesses[:turn], hints[:turn])
        assert len(guesses) == 7 or (len(guesses) < 7 and hints[-1] == "correct")
        assert answer == 45 or "correct" not in hints


def test_halving_a_range_worked_by_hand():
    # 20 to 69: 44, then 45 to 69: 57, 45 to 56: 50, 45 to 49: 47, 45 to 46: 45.
    for guesses, hints, answer in play(Game(low=20, secret=45), halving=1):
        assert guesses == [44, 57, 50, 47, 45]
        assert hints == ["higher", "lower", "lower", "lower", "correct"]
        assert answer == 45


def test_halving_finds_every_number_in_seven_guesses():
    for secret in range(20, 70):
        _, _, answer = next(play(Game(low=20, secret=secret), halving=1))
        assert answer == secret


def test_creeping_stays_within_three_numbers_of_an_end():
    game = Game(low=20, secret=45)
    firsts = set()
    for guesses, hints, answer in play(game, halving=0):
        for turn, number in enumerate([*guesses, answer]):
            possible = possible_after(game, guesses[:turn], hints[:turn])
            assert number in possible[:3] + possible[-3:]
        firsts.add(guesses[0])
    assert firsts == {20, 21, 22, 67, 68, 69}


def test_guesses_halve_as_often_as_asked():
    halved = [guesses[0] == 44 for guesses, _, _ in play(Game(low=20, secret=45), halving=0.3)]
    # 120 of 400, within three standard deviations of 9.2.
    assert abs(sum(halved) - 120) < 28


async def test_the_tool_says_what_demonstrations_have_it_say():
    tool = GuessNumberTool({}, None)
    assert guess_number.GUESS_SCHEMA == SCHEMA
    for i, (guesses, hints, _) in enumerate(play(Game(low=20, secret=45), halving=0.3)):
        await tool.create(str(i), secret=45, max_guesses=guess_number.MAX_GUESSES)
        told = [(await tool.execute(str(i), {"number": n}))[0].text for n in guesses]
        assert told == hints


def test_records_are_scored_by_what_was_found_and_answered(tmp_path):
    task = read_tasks([str(make(tmp_path) / "train.parquet")], max_rows=1)[0]
    score = get_reward("", task.data_source)
    secret = task.tools_kwargs["guess"]["create_kwargs"]["secret"]
    for guesses, answer, expected in (
        ((secret - 1, secret), secret, 1.0),
        ((secret - 1,), secret, 0.0),
        ((secret,), secret + 1, 0.0),
        ((), secret, 0.0),
    ):
        text = "".join(map(guess_number.call, guesses)) + f"#### {answer}"
        given = score(task.data_source, text, task.ground_truth)
        assert (given["score"], given["acc"], given["guesses"]) == (
            expected,
            expected,
            len(guesses),
        )


def test_fewer_than_one_game_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--heldout 0: it takes at least one"):
        make(tmp_path, heldout=0)


def test_the_config_gives_a_turn_for_each_guess_and_one_for_the_answer():
    config = load_config(["configs/guess_number.gin"], [])
    assert config.limits.max_turns == guess_number.MAX_GUESSES + 1
    assert config.run.steps == 20
