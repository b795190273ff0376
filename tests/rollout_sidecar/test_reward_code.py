"""Programs against tests, run by a small server with Sandbox Fusion's contract and by the local sandbox."""

import json
import shutil
from typing import Any

import pytest
from servers_sandbox_fusion import SandboxFusionServer

from rollout_sidecar.rewards.base import compute
from rollout_sidecar.rewards.code import Case, compute_score, last_block, make_tests
from rollout_sidecar.tools.python_sandbox import SandboxOptions, shared_sandbox

DOUBLE = "```python\nn = int(input())\nprint(n * 2)\n```"
PAIRS = {"inputs": ["1\n", "2\n", "0\n", "-4\n"], "outputs": ["2\n", "4\n", "0\n", "-8\n"]}


@pytest.fixture
async def server():
    async with SandboxFusionServer() as server:
        yield server


async def score(server: SandboxFusionServer, text: str, tests: Any, **options: Any):
    score = await compute(
        compute_score,
        data_source="codecontests",
        solution_str=text,
        ground_truth=tests,
        extra_info={},
        sandbox_fusion_url=server.url,
        **options,
    )
    return score


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```python\nx = 2\n```\nc", "x = 2\n"),
        ('```python\ns = "```"\n```', 's = "```"\n'),
        ("  ```cpp\nint x;\n  ```", "int x;\n"),
        ("```python\nx = 1", None),
        ("x = 1", None),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, program: str | None):
    assert last_block(text) == program


def test_every_form_of_tests():
    plain = [Case("p", "1", "2"), Case("p", "3\n4", "7")]
    given = {"inputs": ["1", ["3", "4"]], "outputs": ["2", ["7"]]}
    assert make_tests(given, "p") == plain
    assert make_tests(json.dumps(given), "p") == plain
    rows = [{"input": "1", "output": "2"}, {"input": ["3", "4"], "output": "7"}]
    assert make_tests(rows, "p") == plain
    for asserts in (
        "assert f(1) == 2",
        {"functional": "assert f(1) == 2"},
        {"assert_case": ["assert f(1) == 2"]},
        ["assert f(1) == 2"],
    ):
        [case] = make_tests(asserts, "p")
        assert "assert f(1) == 2" in case.source
        assert case.expected is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"the task has no tests \(keys \[\]\); expected inputs and outputs"),
        ({"inputs": [], "outputs": []}, r"has no tests \(keys \['inputs', 'outputs'\]\)"),
        ({"inputs": ["1"], "outputs": []}, "the tests have 1 inputs but 0 outputs"),
        ([1, 2], 'must hold code, or dicts with "input" and "output"'),
        (5, "the tests are a int, expected a dict"),
    ],
)
def test_tests_that_cannot_be_read(given, message: str):
    with pytest.raises(ValueError, match=message):
        make_tests(given, "p")


# --- standard input ---------------------------------------------------------------------------------------------


async def test_the_score_is_the_share_of_tests_passed(server):
    assert (await score(server, DOUBLE, PAIRS)).reward == 1.0
    square = DOUBLE.replace("n * 2", "n * n")  # right for 2 and 0
    answer = await score(server, square, PAIRS)
    assert answer.reward == 0.5
    assert answer.metrics == {"tests_passed": 0.5, "acc": 0.0, "answered": 1.0}


async def test_all_or_nothing_stops_at_the_first_failure(server):
    options = {"all_or_nothing": True, "concurrency": 1}
    assert (await score(server, DOUBLE, PAIRS, **options)).reward == 1.0
    server.requests.clear()
    square = DOUBLE.replace("n * 2", "n * n")  # the first test fails
    answer = await score(server, square, PAIRS, **options)
    assert (answer.reward, answer.metrics) == (0.0, {"acc": 0.0, "answered": 1.0})
    assert len(server.requests) == 1


async def test_only_the_first_tests(server):
    answer = await score(server, DOUBLE.replace("n * 2", "2"), PAIRS, max_tests=1)
    assert answer.reward == 1.0
    assert len(server.requests) == 1


async def test_words_are_compared_and_not_spaces(server):
    spaced = "```python\ninput()\nprint(' 1  2 ')\nprint()\nprint(3)\n```"
    assert (await score(server, spaced, {"inputs": [""], "outputs": ["1 2\n3"]})).reward == 0.0
    tests = {"inputs": ["\n"], "outputs": ["1 2\n3"]}
    assert (await score(server, spaced, tests)).reward == 1.0


async def test_a_program_that_fails_fails_its_test(server):
    for body in (
        "raise ValueError",
        "while True: pass",
        "print(2); exit(1)",
        "print(2",
        "print(3)",
    ):
        answer = await score(
            server,
            f"```python\n{body}\n```",
            {"inputs": ["1"], "outputs": ["2"]},
            timeout_s=1.0,
        )
        assert answer.reward == 0.0, body


async def test_a_program_that_never_ends_is_soon_given_up(server):
    tests = {"inputs": ["1"] * 20, "outputs": ["2"] * 20}
    loop = "```python\nwhile True: pass\n```"
    answer = await score(server, loop, tests, timeout_s=0.2, concurrency=1)
    assert answer.reward == 0.0
    assert len(server.requests) == 3


async def test_without_a_program_nothing_is_run(server):
    answer = await score(server, "print(2)", PAIRS)
    assert (answer.reward, answer.metrics["answered"]) == (0.0, 0.0)
    assert server.requests == []


async def test_tests_beside_the_ground_truth(server):
    answer = await compute(
        compute_score,
        data_source="apps",
        solution_str=DOUBLE,
        ground_truth="",
        extra_info={"tests": PAIRS},
        sandbox_fusion_url=server.url,
    )
    assert answer.reward == 1.0


async def test_other_languages(server):
    bash = "```bash\nread n\necho $((n * 2))\n```"
    assert (await score(server, bash, PAIRS, language="bash")).reward == 1.0
    with pytest.raises(
        ValueError, match="language='bash' needs sandbox_fusion_url, and tests with"
    ):
        await score(server, bash, "assert True", language="bash")


# --- functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        "def add(a, b):\n    print('adding')\n    return a + b\nif __name__ == '__main__':\n    input()",
    ],
)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([[1, 2], [[1], [2]]], [3, [1, 2]]),
        ([[1, 2], [[1], [2]]], [[3], [[1, 2]]]),  # each wrapped into a list
        (["1\n2", "[1]\n[2]"], ["3", "[1, 2]"]),  # the JSON of a value a line
    ],
)
async def test_functions_are_called(server, program: str, inputs, outputs):
    tests = {"fn_name": "add", "inputs": inputs, "outputs": outputs}
    text = f"```python\n{program}\n```"
    assert (await score(server, text, tests)).reward == 1.0
    assert (await score(server, text.replace("a + b", "b"), tests)).reward == 0.0


async def test_what_is_expected_of_a_function_stays_outside(server):
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    tests = {"fn_name": "add", "inputs": [[12345600, 78]], "outputs": [12345678]}
    assert (await score(server, program, tests)).reward == 1.0
    [request] = server.requests
    assert "12345678" not in request["code"] + request["stdin"]


async def test_a_function_that_ends_the_program_does_not_pass(server):
    tests = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    for body in ("import os; os._exit(0)", "exit(0)", "print(3)", "return {3}", "return {(): 1}"):
        assert (
            await score(server, f"```python\ndef add(a, b):\n    {body}\n```", tests)
        ).reward == 0.0


async def test_assertions(server):
    program = "```python\ndef f(x):\n    return x * x\n```"
    tests = {"assert_case": ["assert f(2) == 4", "assert f(3) == 6"]}
    assert (await score(server, program, tests)).reward == 0.5
    assert (
        await score(server, program, "def check():\n    assert f(3) == 9\ncheck()")
    ).reward == 1.0
    early = "```python\nimport sys\nsys.exit(0)\n```"
    assert (await score(server, early, "assert True")).reward == 0.0


# --- the local sandbox ------------------------------------------------------------------------------------------


@pytest.fixture
async def local():
    options = {"workers": 2}
    yield options
    used = SandboxOptions(wall_s=2.0, cpu_s=2.0, output_bytes=2**20, workers=2)
    await shared_sandbox(used).close()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_the_local_sandbox_runs_every_kind_of_test(local):
    async def run(text: str, tests: Any, **options: Any) -> float:
        answer = await compute(
            compute_score,
            data_source="codecontests",
            solution_str=text,
            ground_truth=tests,
            extra_info={},
            sandbox=local,
            timeout_s=2.0,
            **options,
        )
        return answer.reward

    assert await run(DOUBLE, PAIRS) == 1.0
    assert await run(DOUBLE.replace("n * 2", "n * n"), PAIRS) == 0.5
    function = "```python\ndef f(x):\n    return x * x\n```"
    assert await run(function, {"fn_name": "f", "inputs": [[3]], "outputs": [9]}) == 1.0
    assert await run(function, ["assert f(2) == 4", "assert f(3) == 6"]) == 0.5
    long = "```python\nprint('1 ' * 200000)\n```"
    assert await run(long, {"inputs": [""], "outputs": ["1 " * 200000]}) == 1.0
    for body in ("import os; os.kill(os.getpid(), 9)", "raise ValueError", "x = [0] * 10**10"):
        assert await run(f"```python\n{body}\n```", PAIRS) == 0.0, body
    loop = "```python\nwhile True: pass\n```"
    assert await run(loop, {"inputs": ["1"], "outputs": ["2"]}) == 0.0
    with pytest.raises(RuntimeError, match="a test could not be run: The stdin has 2000000 char"):
        await run(DOUBLE, {"inputs": ["1" * 2_000_000], "outputs": ["2"]})


async def test_settings_of_the_sandbox_are_checked():
    with pytest.raises(ValueError, match="unknown key 'worker' .* did you mean 'workers'"):
        await compute_score("apps", DOUBLE, PAIRS, sandbox={"worker": 1})


# --- no verdict -------------------------------------------------------------------------------------------------


async def test_a_sandbox_that_cannot_run_it_is_no_verdict(server):
    server.faults[:] = ["SandboxError"]
    with pytest.raises(Exception, match="the sandbox could not run the program: no free worker"):
        await score(server, DOUBLE, PAIRS, concurrency=1)


async def test_a_task_without_tests_is_no_verdict(server):
    with pytest.raises(ValueError, match="the task has no tests"):
        await score(server, DOUBLE, None)
