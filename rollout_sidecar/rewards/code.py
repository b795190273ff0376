"""The reward of programs: the last fenced block of the answer, run against tests in a sandbox.

Tests, in the ground truth or in extra_info["tests"], as a dict or its JSON:
- {"inputs": [...], "outputs": [...]}: given on standard input, compared word by word with what is printed;
- with "fn_name": a function of that name (or a method of Solution) is called with the JSON input's values, and what it
  returns is compared with the output as JSON. Outputs never enter the sandbox;
- {"functional": code}, {"assert_case": [code, ...]} or bare Python: run after the program, in its namespace. Such tests
  share the program's process: one that looks for them could cheat.

A program that fails, runs too long or prints too much fails its test. A sandbox that cannot run it at all is no
verdict: it raises, and the trajectory is unscored.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)

MAX_TIMEOUTS = 3
"""A program that ran out of time so often fails the tests that are left without being run: else a hundred endless
loops would outlast the trajectory, and a wrong answer would be no verdict."""


OUTPUT_BYTES = 2**20
"""What is read of a program's output, unless the sandbox's settings say otherwise."""


class Ran(NamedTuple):
    """What became of a program."""

    stdout: str | None
    """None if it failed."""
    timed_out: bool = False


Run = Callable[[str, str], Awaitable[Ran]]
"""(program, standard input) to what became of it."""

_CALL = """
import json, sys
arguments = json.loads(sys.stdin.read())
scope = {{"__name__": "program"}}
exec(compile({program!r}, "program.py", "exec"), scope)
called = scope.get({name!r}) or getattr(scope["Solution"](), {name!r})
result = called(*arguments)
print("\\n" + {marker!r} + json.dumps(result))
"""
_ASSERT = """
scope = {{"__name__": "program"}}
exec(compile({program!r}, "program.py", "exec"), scope)
exec(compile({tests!r}, "tests.py", "exec"), scope)
print("\\n" + {marker!r} + "true")
"""


@dataclass(frozen=True)
class Case:
    """One test: a program's text that holds the answer's, its input, and what must come out."""

    source: str
    stdin: str
    expected: Any
    marker: str = ""
    """Precedes the result as JSON; "" where all that is printed is the result."""

    def passes(self, stdout: str | None) -> bool:
        """Whether this output is the expected one."""
        if stdout is None:
            return False
        if not self.marker:
            return stdout.split() == str(self.expected).split()
        _, found, result = stdout.rpartition("\n" + self.marker)
        try:
            value = json.loads(result) if found else None
        except ValueError:
            return False
        return bool(found) and value in (self.expected, *_unwrapped(self.expected))


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    all_or_nothing: bool = False,
    max_tests: int = 0,
    timeout_s: float = 10.0,
    concurrency: int = 8,
    sandbox: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str = "",
    language: str = "python",
    memory_mb: int = 1024,
) -> dict[str, float]:
    """The share of tests passed; 0 without a fenced block.

    Args:
        all_or_nothing: 1 if all tests pass, else 0; the first failure ends the tests.
        max_tests: only the first so many; 0 for all.
        timeout_s: of one test.
        concurrency: tests of one answer that run at once.
        sandbox: settings of the local sandbox, as in the config of the Python tool.
        sandbox_fusion_url: runs them on this Sandbox Fusion server instead, in any of its languages.
        memory_mb: limit there.
    """
    program = last_block(solution_str)
    tests = make_tests(_given_tests(ground_truth, extra_info), program or "")
    tests = tests[: max_tests or None]
    if program is None:
        return _score(0, len(tests), all_or_nothing, answered=False)
    if language != "python" and (not sandbox_fusion_url or any(test.marker for test in tests)):
        raise ValueError(
            f"language={language!r} needs sandbox_fusion_url, and tests with inputs and outputs"
        )
    if sandbox_fusion_url:
        run = _fusion(sandbox_fusion_url, language, timeout_s, memory_mb)
    else:
        run = _local(sandbox or {}, timeout_s)
    passed = await _passed(tests, run, max(1, concurrency), stop_early=all_or_nothing)
    return _score(passed, len(tests), all_or_nothing, answered=True)


def last_block(text: str) -> str | None:
    """The program in the last closed ``` block of an answer, whatever its language tag."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def make_tests(given: Any, program: str) -> list[Case]:
    """The tests of a task around one program. ValueError if there are none, or they cannot be read."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {"functional": given}
    if isinstance(given, list):
        given = (
            {"assert_case": given} if all(isinstance(x, str) for x in given) else _columns(given)
        )
    if not isinstance(given, Mapping):
        raise ValueError(
            f"the tests are a {type(given).__name__}, expected a dict, its JSON or code"
        )
    if given.get("functional") or given.get("assert_case"):
        codes = given.get("assert_case") or [given["functional"]]
        tests = [_assertion(program, str(code)) for code in codes if str(code).strip()]
    else:
        inputs, outputs = list(given.get("inputs") or ()), list(given.get("outputs") or ())
        if len(inputs) != len(outputs):
            raise ValueError(f"the tests have {len(inputs)} inputs but {len(outputs)} outputs")
        name = given.get("fn_name")
        make = _plain if name is None else lambda *pair: _called(*pair, name=str(name))
        tests = [make(program, *pair) for pair in zip(inputs, outputs, strict=True)]
    if not tests:
        raise ValueError(
            f"the task has no tests (keys {sorted(given)}); expected inputs and outputs, functional,"
            " or assert_case, in the ground truth or in extra_info.tests"
        )
    return tests


def _given_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> Any:
    if ground_truth is None or ground_truth == "":
        return (extra_info or {}).get("tests") or {}
    return ground_truth


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """A list of {"input", "output"} as {"inputs", "outputs"}."""
    if not all(isinstance(row, Mapping) and {"input", "output"} <= row.keys() for row in rows):
        raise ValueError('the list of tests must hold code, or dicts with "input" and "output"')
    return {"inputs": [r["input"] for r in rows], "outputs": [r["output"] for r in rows]}


def _plain(program: str, given: Any, expected: Any) -> Case:
    return Case(program, _lines(given), _lines(expected))


def _called(program: str, given: Any, expected: Any, *, name: str) -> Case:
    """Values are as they are, or text with the JSON of one value a line."""
    arguments = (
        [json.loads(line) for line in given.splitlines() if line.strip()]
        if isinstance(given, str)
        else list(given)
    )
    expected = (
        json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
    )
    marker = secrets.token_hex(8)
    source = _CALL.format(program=program, name=name, marker=marker)
    return Case(source, json.dumps(arguments), expected, marker)


def _assertion(program: str, code: str) -> Case:
    marker = secrets.token_hex(8)
    return Case(_ASSERT.format(program=program, tests=code, marker=marker), "", True, marker)


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _unwrapped(expected: Any) -> list[Any]:
    """Some data sets put the value that a function returns into a list."""
    return list(expected) if isinstance(expected, list) and len(expected) == 1 else []


async def _passed(tests: Sequence[Case], run: Run, concurrency: int, *, stop_early: bool) -> int:
    """How many tests pass. With stop_early, none is started after one that failed."""
    places = asyncio.Semaphore(concurrency)
    failures = timeouts = 0

    async def passes(test: Case) -> bool:
        nonlocal failures, timeouts
        async with places:
            if (stop_early and failures) or timeouts >= MAX_TIMEOUTS:
                return False
            ran = await run(test.source, test.stdin)
            passed = test.passes(ran.stdout)
            failures += not passed
            timeouts += ran.timed_out
            return passed

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(passes(test)) for test in tests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return sum(task.result() for task in tasks)


def _score(passed: int, count: int, all_or_nothing: bool, *, answered: bool) -> dict[str, float]:
    share = passed / count
    solved = float(passed == count)
    metrics = {"acc": solved, "answered": float(answered)}
    # Where tests were left out, how many would have passed is not known.
    return (
        {"score": solved, **metrics}
        if all_or_nothing
        else {"score": share, "tests_passed": share, **metrics}
    )


def _local(options: Mapping[str, Any], timeout_s: float) -> Run:
    from rollout_sidecar.tools.python_sandbox import SandboxOptions, shared_sandbox

    limits = {"wall_s": timeout_s, "cpu_s": timeout_s, "output_bytes": OUTPUT_BYTES}
    box = shared_sandbox(SandboxOptions.from_config({**limits, **options}))

    async def run(program: str, stdin: str) -> Ran:
        result = await box.run(program, stdin=stdin, timeout_s=timeout_s)
        if result.status == "lost" or (result.status == "too_long" and len(stdin) > len(program)):
            raise RuntimeError(f"a test could not be run: {result.reason}")
        stdout = result.stdout if result.status == "ok" else None
        return Ran(stdout, timed_out=result.status == "timeout")

    return run


def _fusion(url: str, language: str, timeout_s: float, memory_mb: int) -> Run:
    from rollout_sidecar.tools.sandbox_fusion_client import run_code

    async def run(program: str, stdin: str) -> Ran:
        result = await run_code(
            url,
            program,
            language=language,
            stdin=stdin,
            run_timeout_s=timeout_s,
            memory_limit_mb=memory_mb,
        )
        stdout = result.stdout if result.outcome == "ok" else None
        return Ran(stdout, timed_out=result.outcome == "timeout")

    return run
