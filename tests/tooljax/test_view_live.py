"""The viewer on a run that goes on, and its evaluations."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import view_browser
from aiohttp.test_utils import TestClient, TestServer
from view_browser import arrived
from view_cases import served, trajectory, write_run

from rollout_sidecar.protocol import RewardWeights, Task
from tooljax.config import Config, RunConfig
from tooljax.config.schema import StoreConfig
from tooljax.store import TrajectoryStore, read_step, stored_steps
from tooljax.store.evaluations import DURING, write_evaluation
from tooljax.store.store import Credit
from tooljax.view.library import Library
from tooljax.view.server import make_app

TASKS = [Task(task_id="h:0", messages=[], ground_truth="5")]


def config(run: Path) -> Config:
    made = Config(run=RunConfig(dir=str(run)))
    return replace(made, model=replace(made.model, path=str(run.parent / "model")))


def evaluate(run: Path, step: int, *, name: str = DURING, answer: str = "#### 6") -> Path | None:
    """One held-out task, answered wrongly by default."""
    problem = [trajectory("2+3?", answer, task_id="h:0", reward=float(answer == "#### 5"))]
    settings = config(run)
    return write_evaluation(
        settings,
        run / "evaluation",
        TASKS,
        [problem],
        name=name,
        step=step,
        metrics={"eval/accuracy": 0.0},
    )


def go_on(run: Path, step: int) -> None:
    """A training step more."""
    TrajectoryStore(config(run), []).write(
        step,
        [[trajectory("2+3?", "#### 7", reward=0.0)]],
        credit=Credit(np.zeros((1, 1), np.float32), [["left out"]]),
        values=[],
        metrics={},
        reward_weights=RewardWeights(),
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": 0.0, "eval/accuracy": 0.125}) + "\n")


# --- what is stored -----------------------------------------------------------------------------------------------


def test_an_evaluation_is_stored_apart_and_in_place_of_later_ones(tmp_path):
    run = write_run(tmp_path / "demo")
    for step in (0, 2, 4):
        evaluate(run, step)
    evaluate(run, 2, answer="#### 5")  # the run was killed, and goes on after step 1
    place = run / "evaluation" / DURING
    assert stored_steps(place) == [0, 2]
    (record,) = read_step(place, 2).records
    assert (record.trajectory.reward, record.dropped) == (1.0, "it is of an evaluation")
    assert record.whole().token_ids[: record.trajectory.prompt_tokens]
    assert stored_steps(run) == [1, 2]  # as before: a replay knows nothing of evaluations


def test_nothing_is_stored_where_the_store_is_off(tmp_path):
    off = replace(config(tmp_path / "run"), store=StoreConfig(enabled=False))
    folder = tmp_path / "run" / "evaluation"
    made = write_evaluation(off, folder, TASKS, [[]], name="base", step=0, metrics={})
    assert made is None
    assert not folder.exists()


async def test_evaluations_can_be_asked_for_like_runs(tmp_path):
    run = write_run(tmp_path / "runs" / "demo")
    go_on(run, 3)
    evaluate(run, 3)
    evaluate(run, 3, name="trained/no_tools")
    for root, name in ((run, "demo"), (run.parent, "demo")):
        async with TestClient(TestServer(make_app(Library(root)))) as client:
            (found,) = (await (await client.get("/api/runs")).json())["runs"]
            assert found["evaluations"] == [
                {"run": f"{name}/evaluation/{each}", "stored_steps": 1, "last_stored": 3}
                for each in ("trained_no_tools", "training")
            ]
            asked = {"run": f"{name}/evaluation/training"}
            told = await (await client.get("/api/steps", params=asked)).json()
            assert told["evaluation_of"] == name
            assert [(s["step"], s["rollout/accuracy"]) for s in told["steps"]] == [(3, 0.125)]
            step = await (await client.get("/api/step", params={**asked, "step": "3"})).json()
            assert step["worst"]["why"].startswith("Wrong: it answered “#### 6”, expected “5”.")


def test_a_link_is_no_evaluation(tmp_path):
    run = write_run(tmp_path / "demo")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "linked").symlink_to(write_run(tmp_path / "elsewhere" / "other"))
    assert list(Library(run).runs()) == ["demo"]


# --- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path):
    """A run that has begun, its address, and a browser."""
    if problem := view_browser.missing():
        pytest.skip(problem)
    run = write_run(tmp_path / "runs" / "demo")
    with served(run) as address, view_browser.browser(tmp_path / "profile") as window:
        yield run, address, window


@pytest.mark.timeout(120)
def test_pages_follow_a_run_that_goes_on(world):
    run, address, window = world
    window.open(f"{address}/#/run?run=demo")
    arrived(window, "/run")
    assert "Worst trajectory of step 2" in window.text("a.worst")
    window.run("window.here = true; document.querySelector('a.row').focus(); scrollTo(0, 40)")
    before = window.run("return [scrollY, document.activeElement.getAttribute('href')]")
    go_on(run, 3)
    window.wait("return document.body.innerText.includes('Worst trajectory of step 3')")
    window.wait("return [...document.querySelectorAll('a.row')].some(a => a.text === 'step 3')")
    assert window.run("return window.here") is True  # the page was not loaded again
    now = "return [scrollY, document.activeElement.getAttribute('href')]"
    assert window.run(now) == before
    # A page that somebody reads stays as it is, and says that there is more.
    window.open(f"{address}/#/step?run=demo&step=3")
    arrived(window, "/step")
    window.run("window.kept = document.querySelector('h1')")
    go_on(run, 4)
    window.wait("return document.querySelector('#news a')?.textContent === 'new: step 4'")
    assert window.run("return document.querySelector('h1') === window.kept")
    window.click("#news a")
    arrived(window, "/step?run=demo&step=4")
    window.wait("return document.querySelector('#news a') === null")
    # The first evaluation comes.
    window.open(f"{address}/#/run?run=demo")
    arrived(window, "/run")
    assert "Evaluations" not in window.text("main")
    evaluate(run, 4)
    window.wait("return document.body.innerText.includes('during training')")
    window.click("a[href^='#/step?run=demo%2Fevaluation%2Ftraining&step=4']")
    arrived(window, "/step?run=demo%2Fevaluation%2Ftraining")
    assert "Wrong: it answered “#### 6”, expected “5”." in window.text("a.worst")
    window.click("a.worst")
    arrived(window, "/trajectory")
    assert "it is of an evaluation" in window.text("aside")
