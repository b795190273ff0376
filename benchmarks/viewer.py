"""How quick the viewer is on a large step: 4,096 trajectories of 2,048 tokens in four turns, with four numbers a token.

    python benchmarks/viewer.py
    python benchmarks/viewer.py --trajectories 512 --tokens 16384

Each line is one answer of the API as the page asks for it, made and encoded as JSON, without HTTP.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout_sidecar.protocol import RewardWeights, Task, ToolCallRecord, Trajectory, Turn
from tooljax.config import Config
from tooljax.store import TrajectoryStore
from tooljax.store.store import Credit
from tooljax.view import server
from tooljax.view.library import Library

GROUP = 8
TURNS = 4
WORDS = "the calculator returns a value because of some long text and numbers 1234 5678".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "run", args.trajectories // GROUP, args.tokens)
        print(f"{args.trajectories} trajectories, {path.stat().st_size / 1e6:.0f} MB")
        ask(Library(Path(folder) / "run"), args.trajectories - 1)
    print(
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB at most, writing included"
    )


def write(folder: Path, groups: int, tokens: int) -> Path:
    """A step of random trajectories; its file."""
    rng = np.random.default_rng(0)
    config = Config()
    config = replace(config, run=replace(config.run, dir=str(folder)))
    tasks = [Task(task_id=f"t:{i}", messages=[], ground_truth="7") for i in range(groups)]
    made = [[trajectory(rng, i, j, tokens) for j in range(GROUP)] for i in range(groups)]
    names: list[str] = ["advantages", "old_log_probs", "log_probs", "entropy"]
    numbers = rng.normal(0, 0.1, (len(names), tokens)).astype(np.float32)
    path = TrajectoryStore(config, tasks).write(
        1,
        made,
        credit=Credit(rng.normal(0, 1, (groups, GROUP)), [[""] * GROUP] * groups),
        values=[dict(zip(names, numbers, strict=True))] * (groups * GROUP),
        metrics={},
        reward_weights=RewardWeights(),
    )
    assert path is not None
    return path


def trajectory(rng: np.random.Generator, task: int, sample: int, tokens: int) -> Trajectory:
    """Four turns with a call each; every third call failed."""
    mask = np.zeros(tokens, bool)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text(rng, tokens // 20)}]
    turns = []
    for i in range(TURNS):
        start = tokens // 10 + i * (tokens * 9 // 10 // TURNS)
        end = start + tokens // 8
        mask[start:end] = True
        call = ToolCallRecord(
            name="calculator",
            arguments={"expression": "1"},
            status="error" if rng.random() < 1 / 3 else "ok",
            result=text(rng, tokens // 20),
        )
        turns.append(Turn(start=start, end=end, policy_version=1, finish="stop", calls=[call]))
        messages.append({"role": "assistant", "content": text(rng, tokens // 10)})
        messages.append({"role": "tool", "content": call.result})
    return Trajectory(
        task_index=task,
        sample_index=sample,
        task_id=f"t:{task}",
        seed=sample,
        status="completed",
        token_ids=rng.integers(0, 30_000, tokens).tolist(),
        prompt_tokens=tokens // 10,
        loss_mask=mask.tolist(),
        rollout_log_probs=np.where(mask, -rng.exponential(0.5, tokens), 0).tolist(),
        turns=turns,
        reward=float(rng.random()),
        messages=messages,
    )


def text(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words))


def ask(library: Library, index: int) -> None:
    """Times the answers."""
    step = {"run": "run", "step": "1"}
    one = {**step, "index": str(index)}
    timed("a step, read from the file", server.step, library, step)
    timed("the same again", server.step, library, step)
    timed("100 rows, worst first", server.trajectories, library, {**step, "order": "worst"})
    timed("... with a failed call", server.trajectories, library, {**step, "error": "any"})
    timed("... with a text", server.trajectories, library, {**step, "text": "5678 the"})
    timed("a conversation", server.trajectory, library, {**one, "order": "worst"})
    timed("its tokens, as ids", server.tokens, library, one)


def timed(
    name: str,
    answer: Callable[[Library, dict[str, str]], dict[str, Any]],
    library: Library,
    query: dict[str, str],
) -> None:
    began = time.perf_counter()
    size = len(msgspec.json.encode(answer(library, query)))
    print(f"{name:28}{1000 * (time.perf_counter() - began):9.1f} ms {size:9,} bytes")


if __name__ == "__main__":
    main()
