"""The answer reward of mathematics: what stands in the last \\boxed{} equals the ground truth, as math-verify sees it.

Equal are numbers of equal value, expressions that sympy can show to be equal, sets in any order, intervals, matrices,
words. A comparison that takes too long is no verdict: it raises, and the trajectory is unscored.

Differs from verl's, which compares normalised text for most data sources.
"""

import atexit
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

START_TIMEOUT_S = 60.0
"""How long a worker may take to import sympy."""
REQUESTS_PER_WORKER = 1000
"""Then another one takes its place: sympy's caches grow."""
MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is wrong without being looked at."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s$]+")
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    answer: Literal["boxed", "line"] = "boxed",
    score: float = 1.0,
    wrong_score: float = 0.0,
    timeout_s: float = 5.0,
) -> dict[str, float]:
    """`score` for the right answer, `wrong_score` for any other and for none. Blocks while it compares.

    Args:
        ground_truth: LaTeX or a number, in a \\boxed{} or not.
        answer: "boxed" reads the last \\boxed{}; "line" the last "Answer: …" line, or a box if there is none.
        timeout_s: deadline of the comparison. TimeoutError then, RuntimeError where it fails.
    """
    if answer not in ("boxed", "line"):
        raise ValueError(f'answer={answer!r} must be "boxed" or "line"')
    gold = str(ground_truth if ground_truth is not None else "").strip()
    boxed = last_boxed(gold)
    gold = _bare(gold if boxed is None else boxed)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} is empty")
    found = answer_line(solution_str) if answer == "line" else None
    found = last_boxed(solution_str) if found is None else found
    given = _bare(found or "")
    # What closes the box that it will be put into could bring a second answer along.
    fits = last_boxed(rf"\boxed{{{given}}}") == given and len(given) <= MAX_ANSWER_CHARACTERS
    correct = bool(given) and fits and _equal(gold, given, timeout_s)
    reward = score if correct else wrong_score
    return {"score": reward, "acc": float(correct), "answered": float(bool(given))}


def compute_dapo_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    wrong_score: float = -1.0,
    timeout_s: float = 5.0,
) -> dict[str, float]:
    """DAPO's rule (arXiv:2503.14476, eq. 7): 1 for the right answer, -1 for any other, read from its "Answer:" line."""
    return compute_score(
        data_source,
        solution_str,
        ground_truth,
        answer="line",
        score=score,
        wrong_score=wrong_score,
        timeout_s=timeout_s,
    )


def last_boxed(text: str) -> str | None:
    """What is in the last \\boxed{…} or \\fbox{…}, braces balanced; `\\boxed 5` too. None if it is not closed."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return bare.group() if bare else None
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1  # \{ and \} are characters
        elif text[i] in "{}":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start + 1 : i]
        i += 1
    return None


def answer_line(text: str) -> str | None:
    """What follows the last "Answer:", to the end of its line; the inside of a box there."""
    found = _LINE.findall(text)
    if not found:
        return None
    return last_boxed(found[-1]) or found[-1]


def _bare(text: str) -> str:
    """Without what surrounds a formula in a sentence."""
    text = text.strip().rstrip(".").strip()
    for open_, close in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = text[len(open_) : -len(close)]
        if text.startswith(open_) and text.endswith(close) and inside and open_ not in inside:
            return inside.strip()
    return text


def _equal(gold: str, answer: str, timeout_s: float) -> bool:
    if gold == answer:
        return True
    reply = _workers.ask({"gold": gold, "answer": answer, "timeout_s": timeout_s})
    if "error" in reply:
        raise RuntimeError(f"math-verify: {reply['error']}")
    return reply["equal"]


class _Worker:
    """One process of math_worker.py."""

    def __init__(self):
        # -P: the folder of the script holds modules with the names of others.
        script = Path(__file__).with_name("math_worker.py")
        kept = (
            "PATH",
            "PYTHONPATH",
            "HOME",
            "LANG",
            "LD_LIBRARY_PATH",
            "SYSTEMROOT",
            "VIRTUAL_ENV",
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
        self._rest = b""
        self.requests = 0
        ready = self._read(START_TIMEOUT_S)
        if "error" in ready:
            self.close()
            raise RuntimeError(
                f"{ready['error']}; the math reward needs it: pip install 'tooljax[tools]'"
            )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its reply. RuntimeError if it ended, TimeoutError if its timer ended it."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        self.requests += 1
        with suppress(BrokenPipeError):  # then there is no reply, which says the same
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        # Later than its own timer: that one is exact, this one is for a machine that stands still.
        return self._read(request["timeout_s"] + START_TIMEOUT_S, request["timeout_s"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _read(self, timeout_s: float, allowed_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened with a pipe"
        out = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        late = TimeoutError(f"the answer could not be compared within {allowed_s:g} s")
        while b"\n" not in self._rest:
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise late
            data = os.read(out, 65536)
            if not data:
                if self._process.wait() == -signal.SIGALRM:
                    raise late
                raise RuntimeError(
                    f"the process that compares answers ended (exit code {self._process.returncode})"
                )
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


class _Workers:
    """A few workers, started when they are needed, each asked by one thread at a time."""

    def __init__(self, count: int):
        self._places = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Waits for a worker and asks it. One that failed to answer is ended."""
        with self._places:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or _Worker()
            try:
                reply = worker.ask(request)
            except BaseException:
                worker.close()
                raise
            if worker.requests >= REQUESTS_PER_WORKER:
                worker.close()
            else:
                with self._lock:
                    self._idle.append(worker)
            return reply

    def close(self) -> None:
        """Ends the idle ones; the others end when their input does."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()


_workers = _Workers(count=max(1, min(4, os.cpu_count() or 1)))
atexit.register(_workers.close)
