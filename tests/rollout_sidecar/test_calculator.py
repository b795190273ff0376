import ast
import contextlib
import operator
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sidecar.tools.base import ToolResponse
from rollout_sidecar.tools.calculator import (
    MAX_BITS,
    CalculatorError,
    CalculatorTool,
    calculate,
    format_number,
)
from rollout_sidecar.tools.registry import load_tools

CONFIGS = Path(__file__).parents[2] / "configs" / "tools"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.3333333333"),
        ("2 / 3", "0.6666666667"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("2 ** 3 ** 2", "512"),
        ("--3", "3"),
        ("1,000 + 1,234,567.5", "1235567.5"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("1.5e3", "1500"),
        (".5 + 2.", "2.5"),
        ("10 / 5", "2"),
        ("1 / 10 ** 9", "0.000000001"),
        ("1 / 10 ** 12", "1e-12"),
        ("123456789012 + 1 / 4", "123456789012.25"),
        ("2 ** 100", str(2**100)),
        ("1 ** 10 ** 9", "1"),
        ("((((((((((5))))))))))", "5"),
    ],
)
def test_results(expression: str, result: str):
    assert format_number(calculate(expression)) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "the expression is empty"),
        ("1 / 0", "division by zero"),
        ("1 % (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("1 +", "ends too early"),
        ("(1 + 2", "parenthesis at character 1 is not closed"),
        ("1 + 2)", r"unexpected '\)' at character 6"),
        ("2 (3)", r"unexpected '\(' at character 3; use \* to multiply"),
        ("2 3", r"unexpected '3' at character 3; use \* to multiply"),
        ("2 ^ 3", r"unexpected '\^' at character 3; use \*\* for powers"),
        ("3 * 4 = 12", "unexpected '=' at character 7; give only the expression"),
        ("10%", "write 10% as 10/100"),
        ("$5", "leave out units"),
        ("1,00", "a comma may only separate thousands"),
        ("sqrt(2)", "names and functions are not supported"),
        ("__import__('os')", "unexpected '_' at character 1"),
        ("2 ** 0.5", "whole exponents only"),
        ("9 ** 9 ** 9", f"more than {MAX_BITS} bits"),
        ("1e1001", "too large or too small"),
        ("1e999999999999", "too large or too small"),
        ("2 ** 4000 * 2 ** 4000", f"more than {MAX_BITS} bits"),
        ("(1 + 1 / 2 ** 3000) ** 2", f"more than {MAX_BITS} bits"),
        ("1" * 513, "has 513 characters, at most 512"),
        ("(" * 80 + "1" + ")" * 80, "nested more than 64 deep"),
        ("-" * 80 + "1", "nested more than 64 deep"),
        ("1" + "**1" * 80, "nested more than 64 deep"),
    ],
)
def test_errors_tell_the_policy_what_to_do(expression: str, message: str):
    with pytest.raises(CalculatorError, match=message):
        calculate(expression)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: base ** int(exponent),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def by_python(expression: str) -> Fraction:
    """Python's own parser, with Fraction for numbers."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return Fraction(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](value(node.operand))
        assert isinstance(node, ast.Constant)
        return Fraction(str(node.value))

    return value(ast.parse(expression, mode="eval").body)


NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", " + "]), inner).map(
            "".join
        ),
        inner.map("({})".format),
        inner.map("-{}".format),
        st.tuples(inner, st.integers(-3, 3)).map(lambda pair: f"({pair[0]})**{pair[1]}"),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EXPRESSIONS)
def test_agrees_with_python(expression: str):
    try:
        expected = by_python(expression)
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            calculate(expression)
        return
    try:
        value = calculate(expression)
    except CalculatorError as error:
        problem = str(error)  # a bound that Python lacks
    else:
        problem = ""
        assert value == expected
    assert problem == "" or re.search(f"more than {MAX_BITS} bits|at most 512", problem)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("0123456789.,+-*/%()e ^=x", max_size=40))
def test_no_text_breaks_the_calculator(text: str):
    # Any other exception fails.
    with contextlib.suppress(CalculatorError):
        assert Fraction(format_number(calculate(text))) is not None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.fractions(-(10**12), 10**12, max_denominator=10**6))
def test_formatted_number_is_right_to_ten_digits(value: Fraction):
    shown = Fraction(format_number(value))
    assert abs(shown - value) <= abs(value) * Fraction(1, 2 * 10**9)


async def test_calculator_as_a_tool():
    tool = load_tools(CONFIGS / "calculator.yaml")["calculator"]
    assert isinstance(tool, CalculatorTool)
    assert tool.get_openai_tool_schema() == CalculatorTool({}, None).tool_schema
    instance, greeting = await tool.create("t:0")
    assert (instance, greeting.is_empty()) == ("t:0", True)
    answer = await tool.execute(instance, {"expression": "6 * 7"})
    assert answer == (ToolResponse(text="42"), 0.0, {})
    # Raised, not answered: a call that computed nothing must not pass for a successful one.
    with pytest.raises(CalculatorError, match="^division by zero$"):
        await tool.execute(instance, {"expression": "1/0"})
    assert await tool.calc_reward(instance) == 0.0
    await tool.release(instance)
