"""One trajectory in full: streams cut into prompt, turns and what tools wrote, and tokens with their numbers."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rollout_sidecar.protocol import Task, Trajectory
from tooljax.store import Record
from tooljax.store.records import StoredStream
from tooljax.store.store import FOLDER
from tooljax.view.why import MEANINGS, SETTINGS

MAX_TOKENS = 8192
"""Tokens of one answer, at most."""

UNFINISHED = "\ufffd"
"""What a tokenizer makes of a part of a character."""


def describe(record: Record, task: Task | None) -> dict[str, Any]:
    """All of a trajectory but its tokens, for JSON."""
    t = record.trajectory
    return {
        "task_id": t.task_id,
        "sample": t.sample_index,
        "group": record.group,
        "seed": str(t.seed),  # 63 bits are too many for JavaScript's numbers
        "data_source": t.data_source,
        "status": t.status,
        "meaning": MEANINGS[t.status],
        "settings": SETTINGS.get(t.status, ""),
        "error": t.error,
        "scored": t.scored,
        "reward": t.reward if t.scored else None,
        "reward_terms": t.reward_terms,
        "metrics": t.metrics,
        "advantage": record.advantage,
        "dropped": record.dropped,
        "ground_truth": None if task is None else task.ground_truth,
        "escaped_special_tokens": t.escaped_special_tokens,
        "total_s": t.total_s,
        "tool_s": t.tool_s,
        "messages": t.messages,
        "turns": [_turn(t, i) for i in range(len(t.turns))],
        "streams": [
            {
                "tokens": stream.token_ids.length,
                "in_loss": bool(stream.values),
                "segments": list(_segments(t, i, stream.token_ids.length)),
            }
            for i, stream in enumerate(record.streams)
        ],
    }


def _turn(t: Trajectory, index: int) -> dict[str, Any]:
    turn = t.turns[index]
    spans = t.streams[turn.stream].version_spans
    versions = [s.policy_version for s in spans if s.start < turn.end and s.end > turn.start]
    return {
        "stream": turn.stream,
        "start": turn.start,
        "end": turn.end,
        "finish": turn.finish,
        "versions": sorted({*versions, turn.policy_version}),
        "cached_tokens": turn.cached_tokens,
        "generate_s": turn.generate_s,
        "calls": turn.calls,
        "reply": turn.reply,
    }


def _segments(t: Trajectory, stream: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Stretches of a stream: the prompt, then turns, and between them what somebody else wrote."""
    position, kind = 0, "prompt"
    turns = [(turn.start, turn.end, i) for i, turn in enumerate(t.turns) if turn.stream == stream]
    for start, end, index in sorted(turns):
        if start > position:
            yield {"kind": kind, "start": position, "end": start}
        yield {"kind": "turn", "start": start, "end": end, "turn": index}
        position, kind = end, "observation"
    if tokens > position:
        yield {"kind": kind, "start": position, "end": tokens}


def tokens(
    stream: StoredStream, tokenizer: Tokenizer | None, *, offset: int, limit: int
) -> dict[str, Any]:
    """Tokens [offset, offset + limit) of a stream as columns; a column is None where nothing is known.

    `ratio` is exp(trainer's log-prob - rollout's). The trainer's is the old policy's (before the step's first update)
    where the run computed it, else the one that the loss saw. Numbers are None where the token was not sampled.
    """
    ids = stream.token_ids.unpack()
    end = min(offset + limit, len(ids))
    mask = stream.loss_mask.unpack()
    rollout = stream.rollout_log_probs.unpack().astype(np.float64)
    trainer = stream.array("old_log_probs")
    trainer = stream.array("log_probs") if trainer is None else trainer
    ratio = None if trainer is None else np.exp(trainer.astype(np.float64) - rollout)
    columns = {
        "rollout_log_prob": rollout,
        "trainer_log_prob": trainer,
        "ratio": ratio,
        "advantage": stream.array("advantages"),
        "ref_log_prob": stream.array("ref_log_probs"),
        "entropy": stream.array("entropy"),
    }
    first = max(0, offset - 16)  # some context: a token's text can depend on what is before it
    texts = None
    if tokenizer is not None:
        texts = token_texts(tokenizer, ids[first:end].tolist())[offset - first :]
    return {
        "total": len(ids),
        "offset": offset,
        "ids": ids[offset:end].tolist(),
        "texts": texts,
        "mask": mask[offset:end].tolist(),
        **{
            name: None if column is None else _numbers(column[offset:end], mask[offset:end])
            for name, column in columns.items()
        },
    }


def _numbers(values: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """Seven digits are all of a float32."""
    return [
        float(f"{value:.7g}") if sampled else None
        for value, sampled in zip(values.tolist(), mask.tolist(), strict=True)
    ]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. Where several make up one character, the last of them has it, the others "".

    Each is decoded with the text before it that is whole: tokenizers drop or keep a space by what comes before.
    """
    texts: list[str] = []
    before = begun = 0  # context, and the first token whose text is not out yet
    for i in range(len(ids)):
        known = tokenizer.decode(list(ids[before:begun]), skip_special_tokens=False)
        text = tokenizer.decode(list(ids[before : i + 1]), skip_special_tokens=False)
        last = i + 1 == len(ids) or i - begun >= 8  # what stays unfinished is no character
        if text.endswith(UNFINISHED) and not last:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before, begun = begun, i + 1
    return texts


def tokenizer_of(run: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer that a run keeps beside its trajectories, and why there is none."""
    file = run / FOLDER / "tokenizer" / "tokenizer.json"
    try:
        return _tokenizer(str(file), file.stat().st_mtime_ns), ""
    except OSError:
        why = f"{run.name}/{FOLDER}/tokenizer/tokenizer.json is not there"
    except Exception as error:  # tokenizers raises no class of its own
        why = f"{run.name}/{FOLDER}/tokenizer/tokenizer.json cannot be read: {error}"
    return None, f"{why}; tokens are shown as ids"


@lru_cache(maxsize=4)
def _tokenizer(file: str, changed_ns: int) -> Tokenizer:
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    return tokenizer
