"""A calculator: exact arithmetic on an expression, bounded in length, depth and size of numbers.

Own tokenizer and recursive descent, never `eval`. Grammar, with Python's precedence and meaning:

    sum     = product (("+" | "-") product)*
    product = unary (("*" | "/" | "//" | "%") unary)*
    unary   = ("+" | "-") unary | power
    power   = atom ("**" unary)?
    atom    = number | "(" sum ")"

Numbers are fractions throughout, so 0.1 + 0.2 is 0.3. A result that is not whole is shown to 10 significant digits,
more if its whole part has more.
"""

import re
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from rollout_sidecar.tools.base import BaseTool, ToolResponse

MAX_LENGTH = 512
MAX_DEPTH = 64
MAX_BITS = 4096
_DIGITS = 10

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
    r"|(?P<symbol>\*\*|//|[-+*/%()]))"
)
_SAME_AS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / // % ** and parentheses, for example (3 + 4) * 2.5",
                }
            },
            "required": ["expression"],
        },
    },
}


class CalculatorError(ValueError):
    """The expression has no value; the message is for the policy."""


class CalculatorTool(BaseTool):
    """Stateless. An expression that cannot be computed is a failed call: the policy is told why, and it is counted."""

    stateless = True
    config_keys = ()

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of the file's entry, else the built-in one."""
        return getattr(self, "tool_schema", None) or SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Computes parameters["expression"]. CalculatorError if it cannot."""
        value = calculate(str(parameters.get("expression", "")))
        return ToolResponse(text=format_number(value)), 0.0, {}


def calculate(expression: str) -> Fraction:
    """The value of an expression. CalculatorError if it has none, or if it exceeds a bound."""
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(
            f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed"
        )
    parser = _Parser(_tokens(expression.translate(_SAME_AS)))
    value = parser.sum(0)
    if parser.next is not None:
        hint = "; use * to multiply" if parser.next.text[0] in "(.0123456789" else ""
        raise CalculatorError(
            f"unexpected {parser.next.text!r} at character {parser.next.at + 1}{hint}"
        )
    return value


def format_number(value: Fraction) -> str:
    """Whole numbers plainly, others as decimals without trailing zeros."""
    if value.denominator == 1:
        return str(value.numerator)
    whole_digits = len(str(abs(value.numerator) // value.denominator))
    context = Context(prec=max(_DIGITS, whole_digits + 2))
    decimal = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    if -_DIGITS <= decimal.adjusted():
        text = f"{decimal:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{decimal.normalize(context):e}"


class _Token(NamedTuple):
    text: str
    at: int
    number: Fraction | None


def _tokens(expression: str) -> list[_Token]:
    tokens: list[_Token] = []
    at, end = 0, len(expression.rstrip())
    while at < end:
        match = _TOKEN.match(expression, at)
        if match is None:
            raise CalculatorError(_unexpected(expression, at))
        kind = "number" if match["number"] else "symbol"
        text = match[kind]
        number = _number(text) if kind == "number" else None
        tokens.append(_Token(text, match.start(kind), number))
        at = match.end()
    if not tokens:
        raise CalculatorError("the expression is empty")
    return tokens


def _unexpected(expression: str, at: int) -> str:
    while expression[at].isspace():
        at += 1
    character = expression[at]
    hint = {
        "^": "; use ** for powers",
        "=": "; give only the expression to compute",
        ",": "; a comma may only separate thousands, as in 1,000",
        "$": "; leave out units",
    }.get(character, "; names and functions are not supported" if character.isalpha() else "")
    return f"unexpected {character!r} at character {at + 1}{hint}"


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > 1000):
        raise CalculatorError(f"the number {text[:24]} is too large or too small")
    return Fraction(mantissa + "0" if mantissa.endswith(".") else mantissa) * Fraction(10) ** int(
        exponent or 0
    )


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError(f"a number on the way has more than {MAX_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("** takes whole exponents only")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    # Before computing: 9**9**9 would take for ever. |base| <= 1 stays small, whatever the exponent.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > MAX_BITS or (abs(exponent) > MAX_BITS and abs(base) not in (0, 1)):
        raise CalculatorError(f"a number on the way has more than {MAX_BITS} bits")
    return _bounded(base ** int(exponent))


class _Parser:
    """Recursive descent. Each nested unit (parenthesis, sign, power) is one deeper."""

    def __init__(self, tokens: list[_Token]):
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> _Token | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self, *symbols: str) -> str | None:
        token = self.next
        if token is None or token.number is not None or token.text not in symbols:
            return None
        self._position += 1
        return token.text

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while symbol := self._take("+", "-"):
            right = self.product(depth)
            value = _bounded(value + right if symbol == "+" else value - right)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.unary(depth)
        while symbol := self._take("*", "/", "//", "%"):
            if self.next is None and symbol == "%":
                raise CalculatorError("% is the remainder of a division; write 10% as 10/100")
            right = self.unary(depth)
            if symbol != "*" and right == 0:
                raise CalculatorError("division by zero")
            if symbol == "*":
                value = value * right
            elif symbol == "/":
                value = value / right
            elif symbol == "//":
                value = Fraction(value // right)
            else:
                value = value % right
            value = _bounded(value)
        return value

    def unary(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"the expression is nested more than {MAX_DEPTH} deep")
        if symbol := self._take("+", "-"):
            value = self.unary(depth + 1)
            return -value if symbol == "-" else value
        return self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        return _power(base, self.unary(depth + 1)) if self._take("**") else base

    def atom(self, depth: int) -> Fraction:
        token = self.next
        if token is None:
            raise CalculatorError("the expression ends too early")
        if token.number is not None:
            self._position += 1
            return _bounded(token.number)
        if not self._take("("):
            raise CalculatorError(f"unexpected {token.text!r} at character {token.at + 1}")
        value = self.sum(depth + 1)
        if not self._take(")"):
            raise CalculatorError(f"the parenthesis at character {token.at + 1} is not closed")
        return value
