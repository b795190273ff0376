"""The curriculum section of the schema: which tasks a step takes. Stages are text, which is read here."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from tooljax.config.types import Fraction, Range

Problem = tuple[tuple[str, ...], str]

POOLS = ("easy", "medium", "hard")

OPERATORS: dict[type[ast.cmpop], str] = {
    ast.LtE: "<=",
    ast.Lt: "<",
    ast.GtE: ">=",
    ast.Gt: ">",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
}

EXAMPLE = "'0: extra_info.level <= 1'"


@dataclass(frozen=True)
class CurriculumConfig:
    """Which tasks a step takes. By default all of data.train in turn, as data.shuffle says."""

    kind: Literal["uniform", "pools"] = "uniform"
    """Tasks in turn; or by difficulty: each is in the pool easy, medium or hard by its measured pass rate, and a step
    is filled from the pools by their weights."""
    easy_above: Fraction = 0.8
    """pools: a task with this pass rate or a higher one is easy."""
    hard_below: Fraction = 0.2
    """pools: a task with a lower pass rate than this is hard."""
    weights: tuple[float, ...] = (1.0, 4.0, 1.0)
    """pools: weights of easy, medium and hard. From a pool with weight 0 tasks come only to be measured again."""
    decay: Annotated[float, Range(low=0, below=1)] = 0.5
    """pools: the pass rate is a running mean, so much of which is what was known before, the rest the newest one."""
    explore: Annotated[float, Range(above=0, high=1)] = 1.0
    """pools: share of a step that tasks get which were never drawn, as long as there are any."""
    revisit_passes: Annotated[float, Range(low=0)] = 4.0
    """pools: a task is drawn again, whatever its pool, when so many passes over all tasks could have been made since.
    0: never."""
    stages: tuple[str, ...] = ()
    """Which tasks may come, by step: 'first step: condition on fields of the record', such as
    ('0: extra_info.level <= 1', '100: file in ("mid", "hard")', '300: all'). Empty: all of them, always."""
    class_path: str = ""
    """A sampler of your own with verl's contract: a Python file, or a module as pkg://name. verl's
    data.sampler.class_path. Empty: none."""
    class_name: str = ""
    """The class in it. verl's data.sampler.class_name."""


class Clause(NamedTuple):
    """One comparison of a stage's condition."""

    field: str
    operator: str
    value: Any


class Stage(NamedTuple):
    """From `first_step` on, the tasks come that meet all clauses."""

    first_step: int
    clauses: tuple[Clause, ...]
    text: str


def parse_stage(text: str) -> Stage:
    """Reads 'first step: condition'. ValueError says what is wrong, and how to write it.

    The condition is `all`, or comparisons joined by `and`: a field, one of <= < >= > == != in, and a literal.
    """
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\S.*?)\s*", text)
    if not found:
        raise ValueError(
            f"curriculum.stages has {text!r}, which is no 'first step: condition'; write for example {EXAMPLE}"
        )
    step, condition = int(found[1]), found[2]
    if condition == "all":
        return Stage(step, (), text)
    try:
        tree = ast.parse(condition, mode="eval").body
        parts = tree.values if isinstance(tree, ast.BoolOp) else [tree]
        if isinstance(tree, ast.BoolOp) and not isinstance(tree.op, ast.And):
            raise ValueError
        clauses = tuple(_clause(part) for part in parts)
    except (ValueError, SyntaxError, TypeError):
        raise ValueError(
            f"curriculum.stages has {text!r}, whose condition cannot be read: it is 'all', or comparisons joined by "
            f"'and', each of a field, {' '.join(OPERATORS.values())}, and a value; write for example {EXAMPLE}"
        ) from None
    return Stage(step, clauses, text)


def _clause(tree: ast.expr) -> Clause:
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        raise ValueError
    operator, value = OPERATORS.get(type(tree.ops[0])), ast.literal_eval(tree.comparators[0])
    if operator is None or (operator == "in") != isinstance(value, list | tuple):
        raise ValueError
    return Clause(_field(tree.left), operator, value)


def _field(tree: ast.expr) -> str:
    if isinstance(tree, ast.Attribute):
        return f"{_field(tree.value)}.{tree.attr}"
    if isinstance(tree, ast.Name):
        return tree.id
    raise ValueError


def curriculum_problems(curriculum: CurriculumConfig) -> Iterator[Problem]:
    """The settings that contradict each other, and a sentence for each contradiction."""
    yield from _stages(curriculum)
    yield from _pools(curriculum)
    if bool(curriculum.class_path) != bool(curriculum.class_name):
        yield _problem(
            f"class_path={curriculum.class_path!r} and curriculum.class_name={curriculum.class_name!r} name a sampler "
            "together; set both, or neither",
            "class_path",
            "class_name",
        )
    elif curriculum.class_path and (curriculum.kind != "uniform" or curriculum.stages):
        yield _problem(
            f"class_path={curriculum.class_path!r} chooses every task itself, so there can be no curriculum.kind="
            f"{curriculum.kind!r} with curriculum.stages={curriculum.stages} beside it; set kind to 'uniform' and "
            "stages to (), or leave class_path and class_name empty",
            "class_path",
            "kind",
            "stages",
        )


def _stages(curriculum: CurriculumConfig) -> Iterator[Problem]:
    steps = []
    for text in curriculum.stages:
        try:
            steps.append(parse_stage(text).first_step)
        except ValueError as error:
            yield ("curriculum.stages",), str(error)
    if len(steps) < len(curriculum.stages) or not steps:
        return
    if steps[0] != 0 or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
        yield _problem(
            f"stages begin at steps {steps}; the first must begin at 0, and each later than the one before",
            "stages",
        )


def _pools(curriculum: CurriculumConfig) -> Iterator[Problem]:
    if curriculum.hard_below >= curriculum.easy_above:
        yield _problem(
            f"hard_below={curriculum.hard_below:g} must be below curriculum.easy_above={curriculum.easy_above:g}: no "
            "task would be medium; set for example 0.2 and 0.8",
            "hard_below",
            "easy_above",
        )
    weights = curriculum.weights
    if len(weights) != len(POOLS) or min(weights) < 0 or not sum(weights) < float("inf"):
        yield _problem(
            f"weights={weights} must be a number from 0 on for each of {', '.join(POOLS)}; write for example (1, 4, 1)",
            "weights",
        )
    elif not any(weights):
        yield _problem(
            f"weights={weights} draws from no pool; give one of {', '.join(POOLS)} a weight above 0, or set "
            "curriculum.kind = 'uniform'",
            "weights",
        )
    if 0 < curriculum.revisit_passes < 1:
        yield _problem(
            f"revisit_passes={curriculum.revisit_passes:g} asks for every task more than once in a pass; set it to 1 "
            "or more, or to 0 for never",
            "revisit_passes",
        )


def _problem(sentence: str, *fields: str) -> Problem:
    return tuple(f"curriculum.{name}" for name in fields), f"curriculum.{sentence}"
