"""Generates word problems of graded difficulty, and imperfect demonstrations of solving them with a calculator.

`python -m tooljax.data.prepare arithmetic --output_dir DIR` writes train.parquet and heldout.parquet (verl records)
and demonstrations.jsonl. Everything derives from --seed. Numbers are split once: a number that occurs in a held-out
problem occurs in no training problem and in no demonstration, so a policy that memorised numbers scores nothing.

A problem of level n tells of n changes to a quantity. Numbers have two or three digits: too hard for a small model's
head, easy for a calculator.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "tooljax/arithmetic"
NUMBERS = range(11, 1000)
HELD_OUT_SHARE = 0.15

NAMES = ("Mia", "Ben", "Zoe", "Sam", "Ida", "Tom", "Eva", "Max")
THINGS = ("apples", "stamps", "coins", "books", "shells", "cards", "pens", "beads")
SENTENCES = {
    "+": ("Finds {n}.", "Buys {n}.", "Gets {n}."),
    "-": ("Loses {n}.", "Sells {n}.", "Eats {n}."),
    "*": ("Then {n} times as many.",),
}

CALCULATOR_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / and parentheses.",
                }
            },
            "required": ["expression"],
        },
    },
}


Change = tuple[str, int]
"""What happens to the quantity: "+", "-" or "*", and by how much."""


@dataclass(frozen=True)
class Problem:
    """A word problem: a quantity and the changes it goes through."""

    question: str
    start: int
    changes: tuple[Change, ...]

    @property
    def expression(self) -> str:
        """The calculation that solves it, for example "(37+58)*12"."""
        return to_expression(self.start, self.changes)

    @property
    def answer(self) -> int:
        """The final quantity."""
        return evaluate(self.start, self.changes)


def to_expression(start: int, changes: tuple[Change, ...]) -> str:
    """Writes the changes as one expression; a sum that is multiplied gets parentheses."""
    expression = str(start)
    for operator, n in changes:
        is_sum = any(sign in expression for sign in "+-")
        left = f"({expression})" if operator == "*" and is_sum else expression
        expression = f"{left}{operator}{n}"
    return expression


def evaluate(start: int, changes: tuple[Change, ...]) -> int:
    """Applies the changes in order."""
    value = start
    for operator, n in changes:
        value = {"+": value + n, "-": value - n, "*": value * n}[operator]
    return value


def split_numbers(seed: int) -> tuple[list[int], list[int]]:
    """Training numbers and held-out numbers, disjoint."""
    shuffled = list(NUMBERS)
    random.Random(f"{seed}/numbers").shuffle(shuffled)
    cut = round(len(shuffled) * HELD_OUT_SHARE)
    return sorted(shuffled[cut:]), sorted(shuffled[:cut])


def make_problem(rng: random.Random, numbers: list[int], level: int) -> Problem:
    """One problem with `level` changes. Quantities stay positive; at most one change multiplies."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    start = value = rng.choice(numbers)
    sentences, changes = [f"{name} has {start} {things}."], []
    multiply_at = rng.randrange(level) if rng.random() < 0.5 else -1
    for step in range(level):
        smaller = [n for n in numbers if n < value]
        if step == multiply_at:
            operator, n = "*", rng.choice([n for n in numbers if n < 100])
        elif smaller and rng.random() < 0.5:
            operator, n = "-", rng.choice(smaller)
        else:
            operator, n = "+", rng.choice(numbers)
        changes.append((operator, n))
        value = evaluate(value, ((operator, n),))
        sentences.append(rng.choice(SENTENCES[operator]).format(n=n))
    sentences.append("How many?")
    return Problem(" ".join(sentences), start, tuple(changes))


def make_problems(
    seed: int, split: str, numbers: list[int], levels: list[int], count: int
) -> list[Problem]:
    """`count` different problems, levels in turn."""
    rng = random.Random(f"{seed}/{split}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng, numbers, levels[len(problems) % len(levels)])
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def to_record(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """The problem as a verl multi-turn record."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.question,
            "answer": problem.expression,
            "level": len(problem.changes),
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "calculator": {"create_kwargs": {"ground_truth": str(problem.answer)}}
            },
        },
    }


def make_demonstration(
    rng: random.Random, problem: Problem, *, tool_share: float, error_share: float
) -> dict[str, Any]:
    """One imperfect demonstration.

    A share `tool_share` calls the calculator, the others guess the answer. Of the calls, a share `error_share` goes
    wrong: a wrong operator, or a call that is not valid JSON. What follows a call is what really would follow.
    """
    user = {"role": "user", "content": problem.question}
    if rng.random() >= tool_share:
        guess = max(1, round(problem.answer * rng.uniform(0.5, 1.5)))
        messages = [user, {"role": "assistant", "content": f"#### {guess}"}]
        return {"messages": messages, "tools": [CALCULATOR_SCHEMA]}
    expression, answer, valid = problem.expression, problem.answer, True
    if rng.random() < error_share:
        if rng.random() < 0.5:
            expression, answer = _wrong_operator(rng, problem)
        else:
            valid = False
    call = _call(expression if valid else expression + '"')
    if valid:
        result, final = str(answer), str(answer)
    else:
        result, final = INVALID_JSON, str(max(1, round(answer * rng.uniform(0.5, 1.5))))
    messages = [
        user,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"#### {final}"},
    ]
    return {"messages": messages, "tools": [CALCULATOR_SCHEMA]}


INVALID_JSON = "Invalid JSON in tool call."


def _call(expression: str) -> str:
    return (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
        + expression
        + '"}}\n</tool_call>'
    )


def _wrong_operator(rng: random.Random, problem: Problem) -> tuple[str, int]:
    """The problem's expression with the operator of one change exchanged, and what it evaluates to."""
    place = rng.randrange(len(problem.changes))
    operator, n = problem.changes[place]
    other = rng.choice([sign for sign in "+-*" if sign != operator])
    changes = (*problem.changes[:place], (other, n), *problem.changes[place + 1 :])
    return to_expression(problem.start, changes), evaluate(problem.start, changes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `prepare arithmetic`."""
    parser.add_argument("--output_dir", required=True, help="folder for the three files")
    parser.add_argument(
        "--seed", type=int, default=0, help="everything derives from it (default 0)"
    )
    parser.add_argument(
        "--levels", type=int, nargs="+", default=[1, 2], help="changes per problem (default 1 2)"
    )
    parser.add_argument("--train", type=int, default=4000, help="training problems (default 4000)")
    parser.add_argument("--heldout", type=int, default=200, help="held-out problems (default 200)")
    parser.add_argument(
        "--demonstrations", type=int, default=8000, help="demonstrations (default 8000)"
    )
    parser.add_argument(
        "--tool_share",
        type=float,
        default=0.75,
        help="demonstrations that call the tool (default 0.75)",
    )
    parser.add_argument(
        "--error_share", type=float, default=0.5, help="calls that go wrong (default 0.5)"
    )


def run(args: argparse.Namespace) -> None:
    """Writes train.parquet, heldout.parquet and demonstrations.jsonl to args.output_dir."""
    if min(args.levels) < 1:
        raise ValueError(f"--levels {args.levels}: a problem needs at least one change")
    for name in ("train", "heldout", "demonstrations"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: it takes at least one")
    train_numbers, heldout_numbers = split_numbers(args.seed)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for split, numbers, count in (
        ("train", train_numbers, args.train),
        ("heldout", heldout_numbers, args.heldout),
    ):
        problems = make_problems(args.seed, split, numbers, args.levels, count)
        records = [to_record(problem, split, i) for i, problem in enumerate(problems)]
        pq.write_table(pa.Table.from_pylist(records), folder / f"{split}.parquet")
    demonstrated = make_problems(
        args.seed, "demonstrations", train_numbers, args.levels, args.demonstrations
    )
    rng = random.Random(f"{args.seed}/mistakes")
    lines = [
        json.dumps(
            make_demonstration(
                rng, problem, tool_share=args.tool_share, error_share=args.error_share
            )
        )
        for problem in demonstrated
    ]
    # Last, and under its name only when complete: it says that the folder is done.
    part = folder / "demonstrations.jsonl.part"
    part.write_text("\n".join(lines) + "\n")
    part.replace(folder / "demonstrations.jsonl")
