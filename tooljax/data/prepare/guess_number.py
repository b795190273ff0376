"""Generates games of guessing a number, and demonstrations of playing them badly.

`python -m tooljax.data.prepare guess_number --output_dir DIR` writes train.parquet and heldout.parquet (verl records)
and demonstrations.jsonl. Everything derives from --seed. A game is a range of WIDTH numbers and a secret in it, to be
found in MAX_GUESSES guesses: the tool says higher, lower or correct, and the answer names what was found. Fifty numbers
and seven guesses are GEM's game:GuessTheNumber-v0-hard (arXiv:2510.01051); there the range is always 1 to 50. Here
ranges are split once: a held-out one occurs in no training game and in no demonstration.

Halving what is possible finds each of 127 numbers in seven guesses, so each of fifty; guessing at random among what is
possible finds 72 %. Demonstrations guess nothing that they know to be wrong, but they halve only now and then: mostly
they creep in from an end of what is possible, which finds 25 %.
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
WIDTH = 50
LOWS = range(1, 100 - WIDTH + 1)
"""First numbers of the ranges, which end at 99 at most."""
HELD_OUT_SHARE = 0.2
MAX_GUESSES = 7
STEPS_FROM_THE_END = 3
"""Creeping guesses one of so many numbers at an end of what is possible."""

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


def make_demonstration(rng: random.Random, game: Game, *, halving_share: float) -> dict[str, Any]:
    """One game played badly: a share `halving_share` of the guesses is the middle of what is possible, the others are
    near one of its ends. What follows a guess really would follow it; a number not found is answered as if guessed."""
    messages = [{"role": "user", "content": game.question}]
    low, high = game.low, game.high
    for _ in range(MAX_GUESSES):
        number = _guess(rng, low, high, halving_share)
        told = hint(game.secret, number)
        messages.append({"role": "assistant", "content": call(number)})
        messages.append({"role": "tool", "content": told})
        if told == "correct":
            low = high = number
            break
        if told == "higher":
            low = number + 1
        else:
            high = number - 1
    answer = _guess(rng, low, high, halving_share)
    messages.append({"role": "assistant", "content": f"#### {answer}"})
    return {"messages": messages, "tools": [GUESS_SCHEMA]}


def _guess(rng: random.Random, low: int, high: int, halving_share: float) -> int:
    if rng.random() < halving_share:
        return (low + high) // 2
    steps = rng.randrange(STEPS_FROM_THE_END)
    return min(high, low + steps) if rng.random() < 0.5 else max(low, high - steps)


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
    parser.add_argument("--train", type=int, default=2000, help="training games (default 2000)")
    parser.add_argument("--heldout", type=int, default=500, help="held-out games (default 500)")
    parser.add_argument(
        "--demonstrations", type=int, default=32000, help="demonstrations (default 32000)"
    )
    parser.add_argument(
        "--halving_share",
        type=float,
        default=0.3,
        help="guesses that halve what is possible (default 0.3)",
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
        json.dumps(make_demonstration(rng, game, halving_share=args.halving_share))
        for game in demonstrated
    ]
    # Last, and under its name only when complete: it says that the folder is done.
    part = folder / "demonstrations.jsonl.part"
    part.write_text("\n".join(lines) + "\n")
    part.replace(folder / "demonstrations.jsonl")
