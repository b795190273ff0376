"""The tool schemas of a tool_config file as the policy reads them, to the byte, in each profile."""

import copy
import json
import pickle
import re
from pathlib import Path

import msgspec
import pytest

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.formats import get_format
from rollout_sidecar.profiles import PROFILES, get_profile
from rollout_sidecar.protocol import Info
from rollout_sidecar.tools.registry import load_tools
from rollout_sidecar.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    read_schema,
)

TOOL = """
from rollout_sidecar.tools.base import BaseTool
class Tool(BaseTool):
    pass
"""


def prompted(tmp_path: Path, monkeypatch, tokenizer, schema: str, profile: str) -> str:
    """What the prompt says between <tools> and </tools>."""
    name = re.sub(r"\W", "_", f"shown_{tmp_path.name}")
    (tmp_path / f"{name}.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n  - class_name: {name}.Tool\n    tool_schema: {schema}\n")
    schemas = [tool.tool_schema for tool in load_tools(file, profile=profile).values()]
    messages = [{"role": "user", "content": "Count to two."}]
    conversation = Conversation(tokenizer, get_format("hermes"), messages, schemas)
    text = tokenizer.decode(conversation.token_ids)
    return text.split("<tools>\n")[1].split("\n</tools>")[0]


# Fields in another order than verl's classes have them, with an empty one, as people write them.
PLAIN = (
    '{function: {description: "Scores it.", name: calc, parameters: {type: object, required: [answer],'
    ' properties: {answer: {description: "The answer.", type: string}, unit: {type: string, enum: [a, b],'
    " description: }}}}, type: function}"
)

AS_WRITTEN = (
    '{"function": {"description": "Scores it.", "name": "calc", "parameters": {"type": "object",'
    ' "required": ["answer"], "properties": {"answer": {"description": "The answer.", "type": "string"},'
    ' "unit": {"type": "string", "enum": ["a", "b"]}}}}, "type": "function"}'
)
EXCLUDE_UNSET = (  # model_dump(exclude_unset=True, exclude_none=True)
    '{"type": "function", "function": {"name": "calc", "description": "Scores it.", "parameters": {"type": "object",'
    ' "properties": {"answer": {"type": "string", "description": "The answer."}, "unit": {"type": "string",'
    ' "enum": ["a", "b"]}}, "required": ["answer"]}}}'
)
ALL_FIELDS = (  # model_dump()
    '{"type": "function", "function": {"name": "calc", "description": "Scores it.", "parameters": {"type": "object",'
    ' "properties": {"answer": {"type": "string", "description": "The answer.", "enum": null}, "unit": {"type":'
    ' "string", "description": null, "enum": ["a", "b"]}}, "required": ["answer"]}, "strict": false}}'
)


@pytest.mark.parametrize(
    ("profile", "text"),
    [("default", AS_WRITTEN), ("A", ALL_FIELDS), ("B", EXCLUDE_UNSET), ("C", EXCLUDE_UNSET)],
)
def test_the_prompt_of_each_profile(tmp_path, monkeypatch, tiny_tokenizer, profile, text):
    assert prompted(tmp_path, monkeypatch, tiny_tokenizer, PLAIN, profile) == text


@pytest.mark.parametrize("profile", ["B", "C"])
def test_a_field_that_was_set_to_its_default_stays(tmp_path, monkeypatch, tiny_tokenizer, profile):
    # As verl's own files have it: exclude_unset leaves out only what was not set.
    schema = PLAIN.replace("name: calc,", "name: calc, strict: false,")
    text = EXCLUDE_UNSET.replace('["answer"]}}}', '["answer"]}, "strict": false}}')
    assert prompted(tmp_path, monkeypatch, tiny_tokenizer, schema, profile) == text


RICH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Ünïcode",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {"type": "array", "item": {"type": "string"}, "description": "typo"},
                "topk": {"type": "integer", "enum": [1, 3, 5], "default": 3},
                "after": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "range": {
                    "type": "object",
                    "properties": {"low": {"type": "number", "minimum": 0}, "default": {"type": "string"}},
                    "additionalProperties": False,
                },
                "tags": {"type": ["array", "null"], "items": {"type": "string", "pattern": "^a"}},
            },
            "required": ["query_list"],
            "additionalProperties": False,
            "$defs": {"default": {"type": "string"}},
        },
        "strict": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("profile", list(PROFILES))
def test_nothing_is_dropped_in_any_profile(tmp_path, monkeypatch, tiny_tokenizer, profile):
    # JSON is YAML.
    text = prompted(tmp_path, monkeypatch, tiny_tokenizer, json.dumps(RICH), profile)
    shown = json.loads(text)
    if profile == "A":
        for each in shown["function"]["parameters"]["properties"].values():
            for key in ("description", "enum"):
                if each[key] is None:
                    del each[key]
    assert shown == RICH


def test_profiles_are_found_by_name():
    assert get_profile("B").tool_lifetime == "call"
    assert {profile.name: profile for profile in PROFILES.values()} == PROFILES
    with pytest.raises(ValueError, match="unknown compat profile 'D'; there are: default, A, B, C"):
        get_profile("D")


# --- the object ---------------------------------------------------------------------------------------------------


def test_a_schema_is_a_dict_and_verls_object():
    schema = read_schema(RICH, "here")
    assert schema == RICH
    assert schema.function.parameters.properties["topk"].enum == [1, 3, 5]
    assert schema.function.parameters.properties["topk"].description is None
    assert schema.function.parameters.required == ["query_list"]
    assert schema.type == "function"
    assert json.loads(schema.model_dump_json(indent=2, exclude_unset=True)) == RICH
    assert json.loads(json.dumps(schema)) == RICH
    for other in (
        copy.deepcopy(schema),
        pickle.loads(pickle.dumps(schema)),
        schema.model_copy(deep=True),
        OpenAIFunctionToolSchema.model_validate_json(json.dumps(RICH)),
        OpenAIFunctionToolSchema(type="function", function=OpenAIFunctionSchema(RICH["function"])),
    ):
        assert other == schema
        assert other.function.name == "search"
    other = schema.model_copy(update={"type": "other"})
    assert (other.type, schema.type) == ("other", "function")
    # The wire takes it as the dict it is.
    fields = dict.fromkeys(("model", "vocab_hash", "engine", "tool_format"), "")
    numbers = dict.fromkeys(("protocol_version", "vocab_size", "policy_version"), 1)
    info = Info(**fields, **numbers, tools=[schema], max_model_tokens=1)  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(info), type=Info).tools == [RICH]


def test_changes_do_not_reach_what_it_was_made_from():
    given = copy.deepcopy(RICH)
    schema = read_schema(given, "here")
    schema.function.name = "other"
    schema["function"]["parameters"]["properties"]["topk"]["default"] = 5
    assert given == RICH
    assert schema.function["name"] == "other"


def test_what_is_not_there_is_said():
    with pytest.raises(
        AttributeError, match=r"this OpenAIFunctionToolSchema has no 'name'; it has"
    ):
        _ = OpenAIFunctionToolSchema(RICH).name
    with pytest.raises(ValueError, match="OpenAIFunctionToolSchema takes a mapping, got 3"):
        OpenAIFunctionToolSchema.model_validate(3)
    with pytest.raises(
        ValueError, match=r"here: tool_schema\.function\.parameters must be a mapping"
    ):
        read_schema({"function": {"name": "f", "parameters": {"properties": []}}}, "here")


def test_a_parsed_call_becomes_a_call():
    read = OpenAIFunctionCallSchema.from_openai_function_parsed_schema
    call, failed = read(OpenAIFunctionParsedSchema(name="f", arguments='{"x": 1}'))
    assert (call.name, call.arguments, failed) == ("f", {"x": 1}, False)
    for text in ("{x: 1}", "[1]"):
        call, failed = read(OpenAIFunctionParsedSchema(name="f", arguments=text))
        assert (call.arguments, failed) == ({}, True)
