"""Function tools as users of verl 0.8 write them."""
# pyright: reportMissingImports=false

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


@function_tool("say_twice")
async def repeat(text: str) -> tuple:
    """Repeats a text.

    Args:
        text: What to repeat.
    """
    return {"text": f"{text} {text}"}, 0.5
