"""Reads data files: rows of Parquet, JSON and JSON Lines, and verl's multi-turn records among them as tasks.

verl's record (its data_preprocess scripts write it): data_source, prompt (messages), reward_model.ground_truth,
extra_info (tools_kwargs, interaction_kwargs, tool_selection and whatever the reward function reads), agent_name.
tools_kwargs and interaction_kwargs may also be columns of their own.

Arrow gives every row the fields of all rows, None where a row had none, so None means missing at every level; only
the ground truth is kept as it is. Differs from verl: a record that cannot be read is an error that names file, row and
field when the files are opened, not a surprise in the middle of a run.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_sidecar.protocol import Message, Task, kwargs_problem, role_problem

T = TypeVar("T")

StrPath = str | PathLike[str]

AGENT_NAMES = ("tool_agent", "single_turn_agent")
"""verl's own agent loops. The second has no tools."""

DEFAULT_INTERACTION = "gsm8k"
"""The interaction of a record whose interaction_kwargs name none, as in verl up to 0.6."""

_LINES = (".jsonl", ".ndjson")

_log = logging.getLogger(__name__)


def read_tasks(
    paths: Sequence[StrPath],
    *,
    max_rows: int = 0,
    prompt_key: str = "prompt",
    reward_key: str = "data_source",
) -> list[Task]:
    """The tasks of verl records, file by file, in order; at most the first `max_rows` rows of each file, 0 for all.

    A task_id is "<file name without suffix>:<row in the file>". Files of the same name get "#2", "#3", ... in the order
    given, so the ids are unique and the same in every run. The keys are verl's data.prompt_key and data.reward_fn_key.
    """
    tasks = []
    without_kwargs = []
    for row_id, row in read_all(paths, max_rows=max_rows):
        task = to_task(
            row.values,
            task_id=row_id,
            where=row.where,
            prompt_key=prompt_key,
            reward_key=reward_key,
        )
        tasks.append(task)
        if task.extra_info.get("need_tools_kwargs") and not task.tools_kwargs:
            without_kwargs.append(row.where)
    if without_kwargs:
        _log.warning(
            "%d rows say need_tools_kwargs but have no tools_kwargs, the first is %s",
            len(without_kwargs),
            without_kwargs[0],
        )
    return tasks


def to_task(
    record: Mapping[str, Any],
    *,
    task_id: str,
    where: str = "the record",
    prompt_key: str = "prompt",
    reward_key: str = "data_source",
) -> Task:
    """One verl record as a task. ValueError, starting with `where`, names the field that cannot be read.

    Tools: agent_name "single_turn_agent" offers none; else extra_info.tool_selection names them; without one, or with
    an empty one as in verl, all of the sidecar's are offered. Interaction: the `name` of interaction_kwargs.
    """
    values = {key: value for key, value in record.items() if value is not None}
    for column in ("images", "videos"):
        if len(values.get(column, ())):
            raise ValueError(f"{where}: {column} is not empty; only text can be trained on")
    if prompt_key not in values:
        raise ValueError(
            f"{where}: {prompt_key} is missing (the row has: {', '.join(values) or 'nothing'}); a verl record has "
            "prompt, a list of {role, content} messages, which `python -m tooljax.data.prepare` makes from raw data"
        )
    extra_info = _object(values, "extra_info", where)
    data_source = values.get(reward_key, "")
    if not isinstance(data_source, str):
        raise ValueError(f"{where}: {reward_key} must be text, got {shown(data_source)}")
    truth = (values.get("reward_model") or {}) if "reward_model" in values else {}
    if not isinstance(truth, Mapping):
        raise ValueError(
            f"{where}: reward_model must be an object with ground_truth, got {shown(truth)}"
        )
    agent_name = values.get("agent_name", "tool_agent")
    interaction, interaction_kwargs = _interaction(agent_name, extra_info, values, where)
    return Task(
        task_id=task_id,
        messages=read_messages(values[prompt_key], field=prompt_key, where=where),
        data_source=data_source,
        ground_truth=_plain(truth.get("ground_truth"), "reward_model.ground_truth", where),
        extra_info=extra_info,
        tools=_offered_tools(agent_name, extra_info, where),
        tools_kwargs=_tools_kwargs(extra_info, values, where),
        interaction=interaction,
        interaction_kwargs=interaction_kwargs,
    )


def read_messages(value: Any, *, field: str, where: str) -> list[Message]:
    """Checks a list of chat messages: each with a role that there is, and with content unless it has tool calls."""
    value = _plain(value, field, where)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: {field} must be a list of at least one {{role, content}} message, got {shown(value)}"
        )
    return [_message(message, f"{field}[{i}]", where) for i, message in enumerate(value)]


def _message(value: Any, field: str, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: {field} must be a {{role, content}} message, got {shown(value)}"
        )
    message = {key: part for key, part in value.items() if part is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{where}: {field}.role must be text such as user, system or assistant, got {shown(role)}"
        )
    if problem := role_problem(role):
        raise ValueError(f"{where}: {field}.role {problem}")
    if message.get("tool_calls"):
        message.setdefault("content", "")
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        return message
    if not isinstance(content, str):
        raise ValueError(
            f"{where}: {field}.content must be text, got {shown(content)}; "
            "write an empty string for no text, and leave out images and videos"
        )
    return message


def _offered_tools(agent_name: Any, extra_info: dict[str, Any], where: str) -> list[str] | None:
    if agent_name not in AGENT_NAMES:
        raise ValueError(
            f"{where}: agent_name {shown(agent_name)} is an agent loop of your own, which cannot run here; "
            f"use {' or '.join(AGENT_NAMES)}, or leave the field out"
        )
    if agent_name == "single_turn_agent":
        return []
    selection = extra_info.get("tool_selection")
    if selection is None:
        return None
    if not isinstance(selection, list) or not all(isinstance(name, str) for name in selection):
        raise ValueError(
            f"{where}: extra_info.tool_selection must be a list of tool names, got {shown(selection)}"
        )
    return selection or None


def _tools_kwargs(
    extra_info: dict[str, Any], values: Mapping[str, Any], where: str
) -> dict[str, dict[str, Any]]:
    tools_kwargs, parent = _kwargs("tools_kwargs", extra_info, values, where)
    for name, kwargs in tools_kwargs.items():
        if problem := kwargs_problem(kwargs):
            raise ValueError(f"{where}: {parent}tools_kwargs.{name}{problem}")
    return tools_kwargs


def _interaction(
    agent_name: Any, extra_info: dict[str, Any], values: Mapping[str, Any], where: str
) -> tuple[str, dict[str, Any]]:
    """The interaction's name and what it is started with, which includes the name, as in verl."""
    kwargs, parent = _kwargs("interaction_kwargs", extra_info, values, where)
    if not kwargs or agent_name == "single_turn_agent":
        return "", {}
    name = kwargs.get("name", DEFAULT_INTERACTION)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{where}: {parent}interaction_kwargs.name must be the name of an interaction, got {shown(name)}"
        )
    return name, kwargs


def _kwargs(
    key: str, extra_info: dict[str, Any], values: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], str]:
    """The object of that name, and where it was found: in extra_info, where verl reads it, or as a column."""
    if extra_info.get(key) or key not in values:
        return _object(extra_info, key, where, parent="extra_info."), "extra_info."
    return _object(values, key, where), ""


def _object(values: Mapping[str, Any], key: str, where: str, *, parent: str = "") -> dict[str, Any]:
    value = values.get(key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {parent}{key} must be an object, got {shown(value)}")
    return without_none(_plain(value, parent + key, where))


def without_none(value: T) -> T:
    """Leaves out the fields that are None, at every level. None in a list stays: Arrow puts none there."""
    fields: Any = value
    if isinstance(value, dict):
        fields = {key: without_none(part) for key, part in value.items() if part is not None}
    elif isinstance(value, list):
        fields = [without_none(part) for part in value]
    return fields


def _plain(value: Any, field: str, where: str) -> Any:
    """The value in the types that JSON and MessagePack share; NumPy scalars and arrays become numbers and lists."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {
            _plain(str(key), field, where): _plain(part, f"{field}.{key}", where)
            for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(part, f"{field}[{i}]", where) for i, part in enumerate(value)]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{where}: {field} holds half of a surrogate pair, which is no character; "
                "write the character itself, or remove it"
            ) from None
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{where}: {field} does not fit 64 bits; write the number as text")
    elif not (value is None or isinstance(value, float)):
        raise ValueError(
            f"{where}: {field} is a {type(value).__name__}; only text, numbers, true and false, lists and objects "
            "can be sent to a sidecar, so write it as text"
        )
    return value


def shown(value: Any) -> str:
    """A value for an error message: "nothing" for None, and not more than 60 characters."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of a data file."""

    values: dict[str, Any]
    number: int
    """Place in the file, the first is 0."""
    where: str
    """The row in words, for error messages."""


def read_all(paths: Sequence[StrPath], *, max_rows: int = 0) -> Iterator[tuple[str, Row]]:
    """The rows of several files, each with an id that is unique among them: "<name>:<row>"."""
    if isinstance(paths, str):
        raise ValueError(
            f"expected a list of files, got the single text {paths!r}; write [{paths!r}]"
        )
    names: set[str] = set()
    for path in map(Path, paths):
        name, copy = path.stem, 1
        while name in names:
            copy += 1
            name = f"{path.stem}#{copy}"
        names.add(name)
        for row in read_rows(path, max_rows=max_rows):
            yield f"{name}:{row.number}", row


def read_rows(path: StrPath, *, max_rows: int = 0) -> Iterator[Row]:
    """The rows of one Parquet, JSON (a list of rows, or a row a line) or JSON Lines file."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder; name the files in it" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {problem} (looked from {Path.cwd()})")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        rows = _parquet_rows(path)
    elif suffix == ".json" or suffix in _LINES:
        rows = _json_rows(path, may_be_list=suffix == ".json")
    else:
        raise ValueError(
            f"{path}: files of type {suffix or '(no suffix)'} cannot be read; convert it to .parquet, .json or .jsonl"
        )
    count = 0
    for row in islice(rows, max_rows or None):
        count += 1
        yield row
    if not count:
        raise ValueError(f"{path}: the file has no rows; write it again, or leave it out")


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    # Arrow's None is no value of the row's own, except that a ground truth is nobody's to change.
                    yield Row(
                        {
                            k: v if k == "reward_model" else without_none(v)
                            for k, v in values.items()
                        },
                        number,
                        f"{path}, row {number} (the first is 0)",
                    )
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}: not a readable Parquet file from row {number} on, write it again: {error}"
        ) from error


def _json_rows(path: Path, *, may_be_list: bool) -> Iterator[Row]:
    with path.open("rb") as file:
        if may_be_list and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            file.seek(0)
            try:
                rows = json.load(file)
            except ValueError as error:
                raise ValueError(f"{path}: not valid JSON: {error}") from error
            for number, values in enumerate(rows):
                where = f"{path}, row {number} (the first is 0)"
                yield Row(_row_object(values, where), number, where)
            return
        file.seek(0)
        number = 0
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, row {number} (the first is 0; line {line_number})"
            try:
                values = json.loads(line)
            except ValueError as error:
                hint = ", or the whole file one list of rows" if may_be_list else ""
                raise ValueError(
                    f"{where}: not valid JSON: {error}; each line must be one row{hint}"
                ) from error
            yield Row(_row_object(values, where), number, where)
            number += 1


def _row_object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a row must be an object with named fields, got {shown(values)}")
    return values
