"""Our reading of harmony against openai-harmony's, on turns of gpt-oss in its own tokens.

The library downloads its vocabulary. Here it gets the one of a real gpt-oss tokenizer.json, in its own file format; it
checks the file's hash itself.
"""

import base64
import json
import os
from pathlib import Path

import pytest
from template_cases import ROOT

from rollout_sidecar.formats import get_format

FOLDER = Path(ROOT) / "gpt_oss"
HARMONY = get_format("harmony")
BPE_TOKENS = 199_998


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory):
    harmony = pytest.importorskip("openai_harmony")
    if not ROOT or not (FOLDER / "tokenizer.json").is_file():
        pytest.skip("TOOLJAX_TEST_TOKENIZERS has no gpt_oss with a tokenizer.json")
    folder = tmp_path_factory.mktemp("harmony")
    (folder / "o200k_base.tiktoken").write_bytes(vocabulary(FOLDER / "tokenizer.json"))
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    try:
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        os.environ.pop("TIKTOKEN_ENCODINGS_BASE")
        if before is not None:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


def vocabulary(file: Path) -> bytes:
    """The byte pairs of a tokenizer.json, one a line: base64 of the bytes, rank."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable}
    bytes_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    vocab = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    ranked = sorted((rank, token) for token, rank in vocab.items() if rank < BPE_TOKENS)
    return b"".join(
        b"%s %d\n" % (base64.b64encode(bytes(bytes_of[c] for c in token)), rank)
        for rank, token in ranked
    )


HEADERS = [
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
    " to=functions.get-weather.v2<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|>analysis to=functions.get_weather code<|message|>",
    "<|channel|>analysis to=browser.search code<|message|>",
    "<|channel|>analysis to=python code<|message|>",
]
BODIES = ['{"city": "Zürich", "n": [1, null]}', "{}", "{oops", "to=functions.f", "two\n\nlines", ""]
ENDS = ["<|end|>", "<|call|>", "<|return|>"]


def theirs(encoding, text: str) -> list[tuple[str, str]]:
    from openai_harmony import Role

    ids = encoding.encode(text, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
    return [
        (message.recipient.removeprefix("functions."), "".join(c.text for c in message.content))
        for message in messages
        if message.recipient and message.recipient != "assistant"
    ]


def expected(calls: list[tuple[str, str]]) -> list[tuple]:
    """What a caller makes of a recipient and a body: arguments, or none if the body is no JSON object."""
    found = []
    for name, body in calls:
        try:
            arguments = json.loads(body)
        except ValueError:
            arguments = None
        found.append((name, arguments if isinstance(arguments, dict) else None))
    return found


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("header", HEADERS)
def test_the_library_finds_the_same_calls(encoding, header: str, end: str):
    for body in BODIES:
        call = f"{header}{body}{end}"
        before = "<|channel|>analysis<|message|>hm to=functions.f<|end|><|start|>assistant"
        after = "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>"
        for text in (call, before + call, call + after):
            ours = [(parsed.name, parsed.arguments) for parsed in HARMONY.parse(text)]
            assert ours == expected(theirs(encoding, text)), text


def test_what_is_rendered_here_the_library_reads(encoding):
    arguments = {"city": 'Zü"rich', "deep": [{"x": None}]}
    text = HARMONY.render_turn("I look.", [("get_weather", arguments), ("g", {})])
    calls = theirs(encoding, text)
    assert expected(calls) == [("get_weather", arguments), ("g", {})]


def test_stop_texts_are_the_library_s_stop_tokens(encoding):
    ids = {encoding.encode(text, allowed_special="all")[0] for text in HARMONY.stop_texts}
    assert ids == set(encoding.stop_tokens_for_assistant_actions())
