"""Generates games of guessing a number, and demonstrations of playing them badly.

`python -m tooljax.data.prepare guess_number --output_dir DIR` writes train.parquet and heldout.parquet (verl records)
and demonstrations.jsonl. Everything derives from --seed. A game is a range of WIDTH numbers and a secret in it; the
tool says higher or lower MAX_GUESSES times, and the answer is the last guess. Ranges are split once: a held-out one
occurs in no training game and in no demonstration.

Halving the range finds any of 63 numbers in six guesses, so each of 32; guessing at random among what is possible
finds 70 %. Demonstrations do either from guess to guess, now and then forget what they were told, and answer too early.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "tooljax/guess_number"
WIDTH = 32
LOWS = range(10, 100 - WIDTH + 1)
"""First numbers of the ranges: all numbers have two digits."""
HELD_OUT_SHARE = 0.2
MAX_GUESSES = 5

GUESS_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether the secret number is higher or lower than this one, or correct.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "The number guessed."}},
            "required": ["number"],
        },
    },
}


@dataclass(frozen=True)
class Game:
    """A range and the number to find in it."""

    low: int
    secret: int

    @property
    def high(self) -> int:
        """The last number of the range."""
        return self.low + WIDTH - 1

    @property
    def question(self) -> str:
        """What the policy is told."""
        return f"My number is one of {self.low} to {self.high}. Which?"


def split_lows(seed: int) -> tuple[list[int], list[int]]:
    """First numbers of training ranges and of held-out ranges, disjoint."""
    shuffled = list(LOWS)
    random.Random(f"{seed}/ranges").shuffle(shuffled)
    cut = round(len(shuffled) * HELD_OUT_SHARE)
    return sorted(shuffled[cut:]), sorted(shuffled[:cut])


def make_games(seed: int, split: str, lows: list[int], count: int) -> list[Game]:
    """The first `count` of all games in these ranges, shuffled; from the start again when there are no more."""
    games = [Game(low, secret) for low in lows for secret in range(low, low + WIDTH)]
    random.Random(f"{seed}/{split}").shuffle(games)
    return [games[i % len(games)] for i in range(count)]


def to_record(game: Game, split: str, index: int) -> dict[str, Any]:
    """The game as a verl multi-turn record."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": game.question}],
        "ability": "games",
        "reward_model": {"style": "rule", "ground_truth": str(game.secret)},
        "extra_info": {
            "split": split,
            "index": index,
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "guess": {"create_kwargs": {"secret": game.secret, "max_guesses": MAX_GUESSES}}
            },
        },
    }


def make_demonstration(
    rng: random.Random,
    game: Game,
    *,
    halving_share: float,
    error_share: float,
    early_share: float,
) -> dict[str, Any]:
    """One game played badly.

    Before each guess a share `early_share` gives up and answers. Of the guesses, a share `halving_share` is the middle
    of what is possible and a share `error_share` any number of the range; the others, and answers, are drawn from what
    is possible. What follows a guess really would follow it.
    """
    messages = [{"role": "user", "content": game.question}]
    low, high = game.low, game.high
    for _ in range(MAX_GUESSES):
        if rng.random() < early_share:
            break
        number = _guess(rng, game, (low, high), halving_share, error_share)
        told = hint(game.secret, number)
        messages.append({"role": "assistant", "content": call(number)})
        messages.append({"role": "tool", "content": told})
        if told == "correct":
            low = high = number
            break
        if told == "higher":
            low = max(low, number + 1)
        else:
            high = min(high, number - 1)
    messages.append({"role": "assistant", "content": f"#### {rng.randint(low, high)}"})
    return {"messages": messages, "tools": [GUESS_SCHEMA]}


def _guess(
    rng: random.Random,
    game: Game,
    possible: tuple[int, int],
    halving_share: float,
    error_share: float,
) -> int:
    kind = rng.random()
    if kind < halving_share:
        return sum(possible) // 2
    if kind < halving_share + error_share:
        return rng.randint(game.low, game.high)
    return rng.randint(*possible)


def hint(secret: int, number: int) -> str:
    """What the tool says of a guess."""
    if number == secret:
        return "correct"
    return "higher" if secret > number else "lower"


def call(number: int) -> str:
    """A guess, as the policy writes it."""
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `prepare guess_number`."""
    parser.add_argument("--output_dir", required=True, help="folder for the three files")
    parser.add_argument(
        "--seed", type=int, default=0, help="everything derives from it (default 0)"
    )
    parser.add_argument("--train", type=int, default=1504, help="training games (default 1504)")
    parser.add_argument("--heldout", type=int, default=384, help="held-out games (default 384)")
    parser.add_argument(
        "--demonstrations", type=int, default=32000, help="demonstrations (default 32000)"
    )
    for name, share, what in (
        ("halving", 0.7, "guesses that halve what is possible"),
        ("error", 0.1, "guesses that forget what was said"),
        ("early", 0.15, "turns that answer instead of guessing"),
    ):
        parser.add_argument(
            f"--{name}_share", type=float, default=share, help=f"{what} (default {share})"
        )


def run(args: argparse.Namespace) -> None:
    """Writes train.parquet, heldout.parquet and demonstrations.jsonl to args.output_dir."""
    for name in ("train", "heldout", "demonstrations"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: it takes at least one")
    train_lows, heldout_lows = split_lows(args.seed)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lows, count in (
        ("train", train_lows, args.train),
        ("heldout", heldout_lows, args.heldout),
    ):
        games = make_games(args.seed, split, lows, count)
        records = [to_record(game, split, i) for i, game in enumerate(games)]
        pq.write_table(pa.Table.from_pylist(records), folder / f"{split}.parquet")
    demonstrated = make_games(args.seed, "demonstrations", train_lows, args.demonstrations)
    rng = random.Random(f"{args.seed}/mistakes")
    lines = [
        json.dumps(
            make_demonstration(
                rng,
                game,
                halving_share=args.halving_share,
                error_share=args.error_share,
                early_share=args.early_share,
            )
        )
        for game in demonstrated
    ]
    # Last, and under its name only when complete: it says that the folder is done.
    part = folder / "demonstrations.jsonl.part"
    part.write_text("\n".join(lines) + "\n")
    part.replace(folder / "demonstrations.jsonl")
