"""A step's trajectories without their tokens: one pass over the file, then rows in memory and a place in the file each.

Tokens are read when somebody looks at a trajectory, so a step of thousands of long trajectories takes little memory.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollout_sidecar.protocol import Task
from tooljax.store import Header, Record, StoreError
from tooljax.store.frames import FrameReader
from tooljax.store.store import decode_header, losses
from tooljax.view.why import CallFacts, Facts, badness, content_text, why


class RecordFacts(msgspec.Struct, frozen=True, tag="trajectory"):
    """Some fields of a Record."""

    trajectory: Facts
    group: int
    advantage: float
    dropped: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory in a list."""

    index: int
    """Its place in the step's file; what the other queries call it."""
    task_id: str
    sample: int
    group: int
    status: str
    reward: float | None
    """None if it was not scored, or aborted."""
    correct: bool
    advantage: float
    dropped: str
    """Why it was left out of the loss; "" if it was trained on."""
    turns: int
    calls: int
    tools: list[str]
    """Tools that it called, each once."""
    errors: list[str]
    """Statuses of calls that failed, each once."""
    failed_calls: int
    tokens: int
    """Sampled ones."""
    seconds: float
    why: str


@dataclass(frozen=True)
class StepIndex:
    """A step's rows, in the order of the file."""

    path: Path
    header: Header
    rows: list[Row]
    worst: list[int]
    """Places of the rows, the worst first."""
    notes: list[str]
    """What was lost of the file, in sentences."""
    _starts: list[int]
    _found: dict[str, set[int]] = field(default_factory=dict)
    """The text that was looked for last, and where it is."""

    @classmethod
    def read(cls, path: Path) -> "StepIndex":
        """Reads all of a file once. StoreError if nothing of it can be read."""
        reader = FrameReader(path)
        frames = iter(reader)
        head = next(frames, None)
        if head is None:
            raise StoreError(
                f"{path} holds nothing that can be read: {reader.note or 'it is empty'}"
            )
        header = decode_header(head, path)
        rows, starts, order = [], [], []
        for facts, start in _facts(frames, reader):
            task = header.tasks.get(facts.trajectory.task_id)
            rows.append(_row(len(rows), facts, task))
            starts.append(start)
            order.append(badness(facts.trajectory))
        worst = sorted(range(len(rows)), key=order.__getitem__)
        return cls(path, header, rows, worst, losses(path, header, len(rows), reader.note), starts)

    def record(self, index: int) -> Record:
        """All of one trajectory. IndexError if there is none; ValueError if the file is another one by now."""
        if not 0 <= index < len(self._starts):
            raise IndexError(
                f"{self.path.name} has no trajectory {index}; it has {len(self._starts)}, from 0 on"
            )
        return msgspec.msgpack.decode(FrameReader(self.path).at(self._starts[index]), type=Record)

    def holding(self, text: str) -> set[int]:
        """Places of trajectories whose messages, tool results or error have this text, in any case. Reads
        the file, unless the same text was looked for last."""
        wanted = text.casefold()
        if wanted not in self._found:
            reader = FrameReader(self.path)
            frames = iter(reader)
            next(frames, None)
            of_file = enumerate(facts.trajectory for facts, _ in _facts(frames, reader))
            found = {
                i for i, facts in of_file if any(wanted in t.casefold() for t in _texts(facts))
            }
            self._found.clear()
            self._found[wanted] = found
        return self._found[wanted]

    def counts(self) -> dict[str, dict[str, int]]:
        """Trajectories by what they can be filtered by, most frequent first."""
        return {
            "status": dict(Counter(row.status for row in self.rows).most_common()),
            "tool": dict(Counter(tool for row in self.rows for tool in row.tools).most_common()),
            "error": dict(Counter(e for row in self.rows for e in row.errors).most_common()),
            "dropped": dict(Counter(row.dropped for row in self.rows if row.dropped).most_common()),
        }


def _facts(frames: Iterator[bytes], reader: FrameReader) -> Iterator[tuple[RecordFacts, int]]:
    """Each trajectory's facts, and where its frame begins."""
    decoder = msgspec.msgpack.Decoder(RecordFacts)
    try:
        for frame in frames:
            yield decoder.decode(frame), reader.start
    except msgspec.DecodeError as error:
        raise StoreError(f"the file holds what no release of tooljax wrote: {error}") from error


def _row(index: int, record: RecordFacts, task: Task | None) -> Row:
    facts = record.trajectory
    calls: list[CallFacts] = [call for turn in facts.turns for call in turn.calls]
    failed = [call for call in calls if call.status != "ok"]
    return Row(
        index=index,
        task_id=facts.task_id,
        sample=facts.sample_index,
        group=record.group,
        status=facts.status,
        reward=facts.reward if facts.scored and facts.status != "aborted" else None,
        correct=facts.correct,
        advantage=record.advantage,
        dropped=record.dropped,
        turns=len(facts.turns),
        calls=len(calls),
        tools=list(dict.fromkeys(call.name for call in calls if call.name)),
        errors=list(dict.fromkeys(call.status for call in failed)),
        failed_calls=len(failed),
        tokens=sum(turn.end - turn.start for turn in facts.turns),
        seconds=facts.total_s,
        why=why(facts, task),
    )


def _texts(facts: Facts) -> Iterator[str]:
    yield facts.task_id
    yield facts.error
    for message in facts.messages:
        yield content_text(message.get("content"))
    for turn in facts.turns:
        for call in turn.calls:
            yield call.result
