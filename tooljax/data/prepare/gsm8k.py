"""Makes verl multi-turn records with a calculator from GSM8K's JSON Lines ({"question", "answer"} a line).

`python -m tooljax.data.prepare gsm8k --input train.jsonl --output train.parquet`. The fields are those of verl's own
gsm8k_multiturn_w_tool; the tool is the calculator instead of verl's reward tool, and the prompt says how to use it.

`--examples N` is for models that were not trained on tools: N worked problems come before the question as turns of the
conversation, so the chat template gives them the very tokens that the policy should write.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_sidecar.formats import get_format
from tooljax.data.records import Row, read_rows, shown

DATA_SOURCE = "openai/gsm8k"
TOOL = "calculator"

SYSTEM = (
    "Solve the math problem. First make one call of the calculator tool, with the whole calculation as one expression. "
    "Then use its result to finish with a line `#### <number>`, the number alone, without a unit."
)

EXAMPLES = (
    ("A box holds 12 pens. How many pens do 7 boxes hold?", "12 * 7", "84"),
    ("Lena had $50 and bought 3 books at $8 each. How many dollars are left?", "50 - 3 * 8", "26"),
    (
        "Omar ran 5 km on Monday and twice as far on Tuesday. How many km did he run in all?",
        "5 + 5 * 2",
        "15",
    ),
    (
        "A baker made 96 rolls, sold a quarter of them and packed the rest in bags of 6. How many bags are there?",
        "(96 - 96 / 4) / 6",
        "12",
    ),
    (
        "Tickets cost $9 for adults and $4 for children. How many dollars do 2 adults and 5 children pay?",
        "2 * 9 + 5 * 4",
        "38",
    ),
    ("A tank of 240 liters is 3/8 full. How many liters are missing?", "240 - 240 * 3 / 8", "150"),
)
"""Question, expression, result."""

_TRUTH = re.compile(r"-?\d[\d,]*(\.\d+)?")


def ground_truth(answer: str) -> str:
    """The number after "####", without commas. ValueError if there is none."""
    _, mark, number = answer.rpartition("####")
    number = number.strip()
    if not mark or not _TRUTH.fullmatch(number):
        raise ValueError(f"answer must end with '#### <number>', got ...{answer[-40:]!r}")
    return number.replace(",", "")


def example_messages(count: int) -> list[dict[str, str]]:
    """The first `count` worked problems, four messages each, with calls in the Hermes format."""
    if not 0 <= count <= len(EXAMPLES):
        raise ValueError(f"--examples {count}: there are 0 to {len(EXAMPLES)} worked examples")
    render_call = get_format("hermes").render_call
    messages = []
    for question, expression, result in EXAMPLES[:count]:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": render_call(TOOL, {"expression": expression})},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": f"#### {result}"},
        ]
    return messages


def to_record(
    question: str, answer: str, *, split: str, index: int, system: str = SYSTEM, examples: int = 0
) -> dict[str, Any]:
    """One problem as a verl multi-turn record."""
    truth = ground_truth(answer)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": system},
            *example_messages(examples),
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": truth}}},
        },
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `prepare gsm8k`."""
    parser.add_argument("--input", required=True, help="GSM8K file, one {question, answer} a line")
    parser.add_argument("--output", required=True, help="Parquet file to write")
    parser.add_argument("--split", default="train", help="extra_info.split (default train)")
    parser.add_argument(
        "--limit", type=int, default=0, help="only the first rows, 0 for all (default)"
    )
    parser.add_argument(
        "--system", default=SYSTEM, help="system message instead of the built-in one"
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=0,
        help=f"worked examples (up to {len(EXAMPLES)}) before the question, for models not trained on tools; default 0",
    )


def run(args: argparse.Namespace) -> None:
    """Writes args.output. ValueError names the line that cannot be used; nothing is written then."""
    output = Path(args.output)
    if output.suffix != ".parquet":
        raise ValueError(f"--output {output}: the name must end in .parquet")
    if args.limit < 0:
        raise ValueError(f"--limit {args.limit}: must be 0 (all rows) or more")
    example_messages(args.examples)  # complains of the option, before any row could be blamed
    records = [_record(row, args) for row in read_rows(args.input, max_rows=args.limit)]
    output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), output)
    print(f"wrote {len(records)} records to {output}")


def _record(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    for field in ("question", "answer"):
        if not isinstance(row.values.get(field), str):
            raise ValueError(
                f"{row.where}: {field} must be text, got {shown(row.values.get(field))}; "
                "a GSM8K row has question and answer"
            )
    try:
        return to_record(
            row.values["question"],
            row.values["answer"],
            split=args.split,
            index=row.number,
            system=args.system,
            examples=args.examples,
        )
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
