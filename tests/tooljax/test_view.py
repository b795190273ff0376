"""The viewer's JSON: what a stored run holds comes out of it, filtered, ordered and paged as asked."""

import math

import pytest
from aiohttp.test_utils import TestClient, TestServer
from view_cases import END, HOSTILE, call, tokenizer, trajectory, write_run

from rollout_sidecar.protocol import Task
from tooljax.view.conversation import token_texts
from tooljax.view.library import Library, curve
from tooljax.view.server import make_app
from tooljax.view.why import Facts, quoted, why


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one run in it, named demo."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "demo")
    return root


@pytest.fixture
async def ask(folder):
    """Asks the API: the answer to a name and parameters, after its status is checked."""
    async with TestClient(TestServer(make_app(Library(folder)))) as client:

        async def ask(name, expected=200, **parameters):
            given = {k: str(v) for k, v in parameters.items()}
            async with client.get(f"/api/{name}", params=given) as answer:
                assert answer.status == expected, await answer.text()
                assert answer.content_type == "application/json"
                return await answer.json()

        yield ask


async def test_runs_and_steps_are_listed(ask, folder):
    found = await ask("runs")
    assert found["root"] == folder.name
    (run,) = found["runs"]
    assert run == {
        **{"run": "demo", "stored_steps": 2, "last_stored": 2, "steps": 3},
        **{"reward": 0.75, "accuracy": None, "evaluations": []},
    }
    steps = (await ask("steps", run="demo"))["steps"]
    assert [(s["step"], s["reward/mean"]) for s in steps] == [(1, 0.25), (2, 0.5)]


async def test_a_step_is_summed_up(ask):
    step = await ask("step", run="demo", step=1)
    assert step["trajectories"] == 6
    assert step["notes"] == []
    # (1 + 0 + 0 - 0.5) / 4: neither what has no reward nor what was aborted
    assert step["reward_mean"] == 0.125
    assert (step["reward_min"], step["reward_max"]) == (-0.5, 1.0)
    assert (step["correct"], step["trained_on"], step["with_failed_calls"]) == (1, 4, 1)
    assert step["counts"]["status"] == {
        **{"completed": 3, "max_turns": 1, "engine_error": 1, "aborted": 1},
    }
    assert step["counts"]["tool"] == {"calculator": 3}
    assert step["counts"]["error"] == {"error": 1}
    assert step["update"] == {"policy/loss": 0.25}
    assert "run.dir" in step["config"]


async def test_the_worst_come_first_faults_before_low_rewards(ask):
    found = await ask("trajectories", run="demo", step=1, order="worst")
    assert [row["index"] for row in found["rows"]] == [3, 5, 2, 1, 0, 4]
    assert (await ask("step", run="demo", step=1))["worst"] == found["rows"][0]


async def test_each_row_says_why(ask):
    rows = (await ask("trajectories", run="demo", step=1))["rows"]
    assert [row["why"] for row in rows] == [
        "Correct: it answered “#### 5”. Reward 1 = outcome 1.",
        "Wrong: it answered “#### 6”, expected “5”. Last tool error: calculator in turn 1, error: "
        f"{quoted(HOSTILE)}. Reward 0 = outcome 0.",
        "Ended by max_turns: it still called a tool in the last turn allowed. Reward 0 = outcome 0.",
        "Ended by engine_error: generation failed: “out of memory”. "
        "It has no reward: the reward function failed or could not run.",
        "Ended by aborted: the trainer asked for that.",
        "Wrong: it answered “I do not know”, expected “5”. It called no tool. "
        "Reward -0.5 = outcome 0 + tool -0.5.",
    ]


@pytest.mark.parametrize(
    ("filters", "indexes"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"order": "best"}, [0, 1, 2, 5, 4, 3]),
        ({"status": "max_turns"}, [2]),
        ({"tool": "calculator"}, [0, 1, 2]),
        ({"tool": "search"}, []),
        ({"error": "error"}, [1]),
        ({"error": "any"}, [1]),
        ({"error": "none", "tool": "calculator"}, [0, 2]),
        ({"dropped": "none"}, [0, 1, 2, 5]),
        ({"dropped": "any"}, [3, 4]),
        ({"dropped": "it ended by aborted"}, [4]),
        ({"min_reward": "0"}, [0, 1, 2]),
        ({"max_reward": "-0.5"}, [5]),
        ({"min_reward": "0.5", "max_reward": "1"}, [0]),
        ({"group": "1"}, [3, 4, 5]),
        ({"text": "do NOT know"}, [5]),
        ({"text": "onerror"}, [1]),
        ({"text": "Out of memory"}, [3]),
        ({"text": "t:0"}, [0, 1, 2]),
    ],
)
async def test_filters(ask, filters, indexes):
    found = await ask("trajectories", run="demo", step=1, **filters)
    assert [row["index"] for row in found["rows"]] == indexes
    assert found["total"] == len(indexes)


async def test_a_list_is_paged_and_has_no_tokens(ask):
    found = await ask("trajectories", run="demo", step=1, offset=2, limit=3)
    assert (found["total"], found["offset"]) == (6, 2)
    assert [row["index"] for row in found["rows"]] == [2, 3, 4]
    assert "token_ids" not in found["rows"][0]
    assert found["rows"][0]["tokens"] == 10  # twice "call" and the end of the turn


async def test_a_trajectory_has_turns_calls_and_neighbours(ask):
    t = await ask("trajectory", run="demo", step=1, index=1, order="worst", tool="calculator")
    assert t["list"] == {"total": 3, "position": 1, "previous": 2, "next": 0}
    assert (t["reward"], t["advantage"], t["dropped"], t["ground_truth"]) == (0.0, -0.5, "", "5")
    assert t["seed"] == str(2**62 + 1)
    assert [m["index"] for m in t["group_members"]] == [0, 1, 2]
    (made,) = t["turns"][0]["calls"]
    assert (made["arguments"], made["status"]) == ({"expression": "2+3"}, "error")
    assert (made["result"], made["latency_s"]) == (HOSTILE, 0.125)
    assert (t["turns"][0]["versions"], t["turns"][0]["generate_s"]) == ([3], 0.25)
    # "2+3?" is 4 tokens, "call" and its end 5, the tool's text as many as it has letters, "#### 6" and its end 7.
    tool = 9 + len(HOSTILE)
    assert t["streams"][0]["segments"] == [
        {"kind": "prompt", "start": 0, "end": 4},
        {"kind": "turn", "start": 4, "end": 9, "turn": 0},
        {"kind": "observation", "start": 9, "end": tool},
        {"kind": "turn", "start": tool, "end": tool + 7, "turn": 1},
    ]
    assert t["tokenizer_problem"] == ""


async def test_a_trajectory_outside_its_list_has_no_place(ask):
    t = await ask("trajectory", run="demo", step=1, index=5, tool="calculator")
    assert t["list"] == {"total": 3, "position": None, "previous": None, "next": None}


async def test_tokens_have_text_and_numbers(ask):
    t = await ask("tokens", run="demo", step=1, index=0)
    # "é" is two bytes: the text comes with the second one.
    assert t["texts"][:7] == ["2", "+", "3", " ", "", "é", "?"]
    assert t["texts"][7:12] == ["c", "a", "l", "l", "<|im_end|>"]
    assert t["ids"][11] == END
    assert t["mask"][6:8] == [False, True]
    assert t["rollout_log_prob"][6:8] == [None, -0.5]
    assert t["trainer_log_prob"][6:8] == [None, -0.25]  # of the old policy, where there is one
    assert t["ratio"][7] == pytest.approx(math.exp(-0.25 - -0.5), abs=1e-6)
    assert t["advantage"][6:8] == [None, 1.0]
    assert t["entropy"] is None


async def test_tokens_are_paged(ask):
    t = await ask("tokens", run="demo", step=1, index=0, offset=5, limit=3)
    assert (t["total"], t["offset"], t["texts"]) == (20, 5, ["é", "?", "c"])
    assert t["ratio"][2] == pytest.approx(math.exp(0.25), abs=1e-6)


async def test_what_was_left_out_of_the_loss_has_rollout_numbers_only(ask, folder):
    t = await ask("tokens", run="demo", step=1, index=3)
    assert t["rollout_log_prob"] == [None] * 4
    assert t["ratio"] is None
    assert t["advantage"] is None


async def test_each_token_stream_has_its_own_segments(ask):
    t = await ask("trajectory", run="demo", step=2, index=0)
    assert [s["tokens"] for s in t["streams"]] == [3, 3]
    assert [s["segments"][1]["turn"] for s in t["streams"]] == [0, 1]
    first, last = [
        (await ask("tokens", run="demo", step=2, index=0, stream=i))["texts"] for i in (0, 1)
    ]
    assert (first, last) == (["a", "b", "<|im_end|>"], ["c", "d", "<|im_end|>"])


async def test_curves_come_with_their_meaning(ask):
    found = await ask("metrics", run="demo", names="reward/mean,rollout/accuracy,none/such")
    assert found["curves"] == {
        **{"reward/mean": [[1, 0.25], [2, 0.5], [3, 0.75]], "rollout/accuracy": []},
        "none/such": [],
    }
    assert found["names"]["reward/mean"] == {"meaning": "Mean reward of trajectories.", "unit": ""}


def test_a_long_curve_is_averaged():
    rows = [{"step": s, "x": float(s)} for s in range(1, 7)]
    assert curve(rows, "x", 3) == [(1.5, 1.5), (3.5, 3.5), (5.5, 5.5)]


@pytest.mark.parametrize(
    ("name", "parameters", "status", "sentence"),
    [
        ("step", {"run": "demo"}, 400, "missing required field `step`"),
        ("step", {"run": "demo", "step": "one"}, 400, "Expected `int`"),
        (
            "step",
            {"run": "demo", "step": 9},
            404,
            "step 9 of demo is not stored; stored are 1 to 2",
        ),
        ("steps", {"run": "other"}, 404, "there is no run 'other'; there are: demo"),
        ("steps", {"run": "demo", "stp": 1}, 400, "unknown parameter 'stp'; there are: run"),
        ("trajectories", {"run": "demo", "step": 1, "limit": 501}, 400, "<= 500"),
        ("trajectories", {"run": "demo", "step": 1, "order": "odd"}, 400, "Invalid enum value"),
        (
            "trajectory",
            {"run": "demo", "step": 1, "index": 6},
            404,
            "has no trajectory 6; it has 6",
        ),
        ("tokens", {"run": "demo", "step": 1, "index": 0, "stream": 1}, 404, "there are 1"),
    ],
)
async def test_a_wrong_question_is_answered_in_a_sentence(ask, name, parameters, status, sentence):
    assert sentence in (await ask(name, status, **parameters))["error"]


async def test_without_the_tokenizer_tokens_are_ids(tmp_path):
    run = write_run(tmp_path / "demo")
    (run / "trajectories" / "tokenizer" / "tokenizer.json").unlink()
    async with TestClient(TestServer(make_app(Library(run)))) as client:
        query = {"run": "demo", "step": "1", "index": "0"}
        tokens = await (await client.get("/api/tokens", params=query)).json()
        found = await (await client.get("/api/trajectory", params=query)).json()
    assert tokens["texts"] is None
    assert tokens["ids"][11] == END
    assert found["tokenizer_problem"] == (
        "demo/trajectories/tokenizer/tokenizer.json is not there; tokens are shown as ids"
    )
    assert found["messages"][1] == {"role": "assistant", "content": "call"}


def test_a_step_that_is_written_again_is_read_again(tmp_path):
    run = write_run(tmp_path / "demo")
    library = Library(run)
    assert len(library.step("demo", 2).rows) == 1
    file = run / "trajectories" / "step_2.log"
    file.write_bytes((run / "trajectories" / "step_1.log").read_bytes())
    assert len(library.step("demo", 2).rows) == 6


def test_tokens_that_never_become_a_character_come_out():
    ids = tokenizer().encode("é").ids[:1] * 12
    texts = token_texts(tokenizer(), ids)
    assert len(texts) == 12
    assert set("".join(texts)) == {"\ufffd"}


def facts(*said: str, **fields) -> Facts:
    """Of a trajectory."""
    t = trajectory(*said, **fields)
    kept = {name: getattr(t, name) for name in Facts.__struct_fields__ if hasattr(t, name)}
    return Facts(**kept)


def test_without_an_acc_the_reward_says_what_is_correct():
    task = Task(task_id="t:0", messages=[])
    assert why(facts("2+3?", "5", reward=1.0), task).startswith("Correct: it answered “5”.")
    assert why(facts("2+3?", "5", reward=0.4), task).startswith("Wrong: it answered “5”.")


def test_a_right_tool_result_that_was_not_used_is_told():
    said = facts("2+3?", "call", "5", "so it is\n#### 6\n", calls={0: call()})
    assert why(said, Task(task_id="t:0", messages=[], ground_truth={"value": 5})) == (
        'Wrong: it answered “#### 6”, expected “{"value":5}”. The last tool result was “5”. Reward 0.'
    )


def test_a_long_quotation_is_cut():
    assert quoted("a\n b" + "c" * 200) == "“a b" + "c" * 116 + "…”"
