"""Runs for the tests of the viewer, written by the trajectory store itself."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout_sidecar.protocol import (
    RewardWeights,
    Task,
    TokenStream,
    ToolCallRecord,
    Trajectory,
    Turn,
    VersionSpan,
)
from tooljax.config import Config
from tooljax.store import TrajectoryStore
from tooljax.store.store import Credit

HOSTILE = (
    '<script>window.stolen=1</script><img src=x onerror="window.stolen=2">'
    "</pre><a href='javascript:window.stolen=3'>"
)
ALPHABET = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
END = len(ALPHABET)
"""The id of <|im_end|>."""


def tokenizer() -> Tokenizer:
    """A token is a byte; <|im_end|> is one too."""
    made = Tokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    made.decoder = decoders.ByteLevel()  # type: ignore
    made.add_special_tokens(["<|im_end|>"])
    return made


def trajectory(prompt: str, *said: str, calls: dict[int, ToolCallRecord] | None = None, **fields):
    """A conversation: the prompt, then in turn what the policy and a tool say. Each sampled token has log-prob -0.5."""
    encode = tokenizer().encode
    ids, mask, turns, messages = list(encode(prompt).ids), [], [], []
    mask = [False] * len(ids)
    messages.append({"role": "user", "content": prompt})
    start = len(ids)
    for i, text in enumerate(said):
        sampled = i % 2 == 0
        new = [*encode(text).ids, *([END] if sampled else [])]
        if sampled:
            made = [c for n, c in (calls or {}).items() if n == len(turns)]
            turn = Turn(
                start=len(ids), end=len(ids) + len(new), policy_version=3, finish="stop", calls=made
            )
            turns.append(msgspec.structs.replace(turn, generate_s=0.25))
        messages.append({"role": "assistant" if sampled else "tool", "content": text})
        ids += new
        mask += [sampled] * len(new)
    return msgspec.structs.replace(
        Trajectory(task_index=0, sample_index=0, task_id="t:0", seed=2**62 + 1, status="completed"),
        token_ids=ids,
        prompt_tokens=start,
        loss_mask=mask,
        rollout_log_probs=[-0.5 if m else 0.0 for m in mask],
        version_spans=[VersionSpan(start=t.start, end=t.end, policy_version=3) for t in turns],
        turns=turns,
        messages=messages,
        **fields,
    )


def call(status: str = "ok", result: str = "5", **fields) -> ToolCallRecord:
    """Of the calculator."""
    given = {"name": "calculator", "arguments": {"expression": "2+3"}, "raw": "<call>", **fields}
    return ToolCallRecord(status=status, result=result, latency_s=0.125, **given)  # type: ignore


def trajectories() -> list[Trajectory]:
    """Of one step: right, wrong with a hostile tool, at its limit, broken, aborted, wrong without a call."""
    acc = {"acc": 0.0}
    made = [
        trajectory(
            "2+3 é?", "call", "5", "#### 5", calls={0: call()},
            reward=1.0, reward_terms={"outcome": 1.0}, metrics={"acc": 1.0},
        ),
        trajectory(
            "2+3?", "call", HOSTILE, "#### 6", calls={0: call("error", HOSTILE)},
            reward=0.0, reward_terms={"outcome": 0.0}, metrics=acc,
        ),
        trajectory(
            "2+3?", "call", "5", "call", calls={0: call(), 1: call()},
            status="max_turns", reward=0.0, reward_terms={"outcome": 0.0}, metrics=acc,
        ),
        trajectory("2+3?", status="engine_error", error="out of memory", scored=False),
        trajectory("2+3?", status="aborted"),
        trajectory(
            "2+3?", "I do not know",
            reward=-0.5, reward_terms={"outcome": 0.0, "tool": -0.5}, metrics=acc,
        ),
    ]  # fmt: skip
    return [
        msgspec.structs.replace(t, sample_index=i % 3, task_index=i // 3, task_id=f"t:{i // 3}")
        for i, t in enumerate(made)
    ]


def write_run(folder: Path) -> Path:
    """A run with two steps and three rows of metrics; its path."""
    model = folder.parent / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(model / "tokenizer.json"))
    config = Config()
    config = replace(
        config,
        run=replace(config.run, dir=str(folder)),
        model=replace(config.model, path=str(model)),
    )
    tasks = [Task(task_id=f"t:{i}", messages=[], ground_truth="5") for i in range(2)]
    store = TrajectoryStore(config, tasks)
    store.forget_after(0)
    made = trajectories()
    why = ["", "", "", "it ended by engine_error", "it ended by aborted", ""]
    advantages = np.array([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0]])
    _write(store, 1, [made[:3], made[3:]], [why[:3], why[3:]], advantages)
    _write(store, 2, [[forked()]], [[""]], np.array([[0.0]]))
    rows = [{"step": s, "reward/mean": s / 4, "rollout/accuracy": None} for s in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def forked() -> Trajectory:
    """With two token streams."""
    first, last = trajectory("a", "b"), trajectory("c", "d")
    stream = TokenStream(**{name: getattr(first, name) for name in TokenStream.__struct_fields__})
    turns = [first.turns[0], msgspec.structs.replace(last.turns[0], stream=1)]
    return msgspec.structs.replace(last, earlier_streams=[stream], turns=turns)


def _write(store: TrajectoryStore, step: int, groups, dropped, advantages) -> None:
    """The trainer's log-prob of each sampled token is -0.25, in the last update -0.3."""
    values = []
    for i, group in enumerate(groups):
        for j, t in enumerate(group):
            for stream in t.streams if not dropped[i][j] else ():
                mask = np.asarray(stream.loss_mask, np.float32)
                given = {"old_log_probs": -0.25, "log_probs": -0.3, "advantages": advantages[i, j]}
                values.append({k: (v * mask).astype(np.float32) for k, v in given.items()})
    store.write(
        step,
        groups,
        credit=Credit(advantages, dropped),
        values=values,
        metrics={"policy/loss": 0.25},
        reward_weights=RewardWeights(),
    )


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `python -m tooljax.view` on the folder."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tooljax.view", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[1].rstrip("/")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
