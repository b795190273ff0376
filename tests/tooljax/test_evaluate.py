"""Evaluation through a real sidecar with a calculator, with and without it; what counts as correct; the table."""

import io
import os
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from served_sidecars import Served, make_tasks, make_tokenizer, serve

from rollout_sidecar.client import SidecarError
from rollout_sidecar.formats import get_format
from rollout_sidecar.protocol import Limits, SamplingParams, Task, Trajectory, derive_seed
from rollout_sidecar.tools.calculator import CalculatorTool
from tooljax.config import Config
from tooljax.config.schema import EvaluateConfig, LimitsConfig, RunConfig, SamplingConfig
from tooljax.evaluate import evaluate, limits, main, sampling, show
from tooljax.evaluation.comparison import Comparison, Measured
from tooljax.evaluation.conditions import Condition, replace_tools
from tooljax.evaluation.result import Evaluation, is_correct
from tooljax.metrics import check_names
from tooljax.rollouts import Sidecars
from tooljax.train import Run

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def honest(tokenizer):
    """Computes with the calculator where the prompt offers one, and does not know the answer where not."""

    def script(request, turn: int) -> str:
        text = tokenizer.decode(request.token_ids)
        number = text.partition("Problem ")[2].partition("?")[0]
        if "calculator(" not in text:
            return "I don't know"
        if turn == 0:
            return get_format("hermes").render_call("calculator", {"expression": f"{number}+0"})
        return "#### " + text.rpartition("<tool_response>\n")[2].partition("\n")[0]

    return script


def small(**fields) -> Config:
    return Config(
        run=RunConfig(seed=5),
        limits=LimitsConfig(max_turns=3, max_tokens_per_turn=128),
        evaluate=EvaluateConfig(**fields),
    )


def test_the_tools_are_what_makes_the_difference_and_nothing_else_is_changed(tokenizer):
    tools = [CalculatorTool({}, SCHEMA)]
    tasks = make_tasks(6)
    with serve(tokenizer, honest(tokenizer), count=2, tools=tools) as served:
        with Sidecars([one.url for one in served], token=None, timeout_s=30.0) as sidecars:
            with_tools = evaluate(small(samples=2), sidecars, tasks)
            withheld = Condition("served", "no_tools")
            without = evaluate(small(samples=2), sidecars, tasks, withheld)
            once = evaluate(small(samples=2), sidecars, tasks, Condition("served", "single_turn"))
        sampling_used = [request.sampling for one in served for request in one.engine.requests]
        prompts = [text for one in served for text in one.prompts()]
    assert with_tools.correct == [[True, True]] * 6
    assert without.correct == once.correct == [[False, False]] * 6
    assert (with_tools.accuracy, without.accuracy) == (1.0, 0.0)
    assert once.metrics["eval/rollout/turns/mean"] == 1.0
    assert once.metrics["eval/rollout/status/max_turns_frac"] == 1.0
    assert with_tools.metrics["eval/accuracy"] == 1.0
    assert with_tools.metrics["eval/tools/use_rate"] == 1.0
    assert without.metrics["eval/tools/use_rate"] == 0.0
    assert ["calculator(" in text for text in prompts].count(True) == 24
    assert len(prompts) == 36
    assert all(used == SamplingParams(temperature=0.0) for used in sampling_used)
    check_names(with_tools.metrics)
    # Paired: the same draws in both, and none that a training step (a small number in place of 2**32) makes.
    seeds = [[derive_seed(5, 2**32, i, s)] for i in range(6) for s in range(2)]
    for evaluation in (with_tools, without, once):
        assert [[t.seed] for t in evaluation.trajectories] == seeds
        assert [t.task_id for t in evaluation.trajectories] == [
            f"t{i}" for i in range(6) for _ in range(2)
        ]


def test_withholding_changes_only_the_tools():
    task = Task(
        task_id="t",
        messages=[{"role": "user", "content": "x"}],
        data_source="s",
        ground_truth="2",
        extra_info={"index": 3},
        tools=["calculator"],
        tools_kwargs={"calculator": {"create_kwargs": {"a": 1}}},
    )
    assert replace_tools(task) == msgspec.structs.replace(task, tools=[])
    assert task.tools == ["calculator"]


@pytest.mark.parametrize(
    ("reward", "metrics", "expected"),
    [
        (1.0, {}, True),
        (0.5, {}, True),
        (0.25, {}, False),  # such as shaping for a call, and a wrong answer
        (0.0, {"acc": 1.0}, True),
        (1.2, {"acc": 0.0}, False),  # acc decides where there is one
        (-1.0, {"score": 1.0}, False),
    ],
)
def test_what_is_correct(reward, metrics, expected):
    trajectory = Trajectory(
        task_index=0,
        sample_index=0,
        task_id="t",
        seed=0,
        status="completed",
        reward=reward,
        metrics=metrics,
    )
    assert is_correct(trajectory) is expected


def test_every_limit_and_sampling_setting_reaches_the_wire():
    asked = LimitsConfig(
        max_turns=2,
        max_tokens_per_turn=3,
        max_trajectory_tokens=4,
        max_prompt_tokens=5,
        max_tool_result_tokens=6,
        max_parallel_calls=7,
        max_invalid_turns=9,
        tool_timeout_s=10.5,
        trajectory_timeout_s=11.5,
    )
    wire = limits(asked)
    # Not one is left at its default.
    assert all(getattr(wire, f) != getattr(Limits(), f) for f in Limits.__struct_fields__)
    assert all(getattr(wire, f) == getattr(asked, f) for f in Limits.__struct_fields__)
    assert sampling(SamplingConfig(0.7, 0.9, 3)) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=3
    )


def test_the_table_shows_each_policy_with_its_interval():
    def problems(right: int) -> list[list[Trajectory]]:
        return [
            [
                Trajectory(
                    task_index=i,
                    sample_index=0,
                    task_id="t",
                    seed=0,
                    status="completed",
                    reward=float(i < right),
                )
            ]
            for i in range(10)
        ]

    comparison = Comparison(
        [
            Measured(Condition("base"), Evaluation(problems(4))),
            Measured(Condition("trained"), Evaluation(problems(10))),
        ],
        note="[bold]not markup[/]",
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    show(comparison, console)
    text = console.export_text()
    assert "10 held-out trajectories" in text
    lines = [line.replace("│", " ").split() for line in text.splitlines()]
    # Wilson, 95 %: 4 of 10 is 0.168 to 0.687, 10 of 10 is 0.722 to 1.
    assert ["base", "0.400", "0.168", "to", "0.687", "0.00", "0.00", "0.0"] in lines
    assert ["trained", "1.000", "0.722", "to", "1.000", "0.00", "0.00", "0.0"] in lines
    assert "trained less base: accuracy +0.600 (+0.300 to +0.900)" in text
    assert "[bold]not markup[/]" in text


def records(folder, count: int):
    file = folder / "heldout.jsonl"
    rows = [
        {
            "data_source": task.data_source,
            "prompt": task.messages,
            "reward_model": {"ground_truth": task.ground_truth},
            "extra_info": {"index": i},
        }
        for i, task in enumerate(make_tasks(count))
    ]
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return file


def test_the_command_prints_both_rows(tokenizer, tmp_path, capsys):
    tools = [CalculatorTool({}, SCHEMA)]
    with serve(tokenizer, honest(tokenizer), tools=tools) as served:
        settings = [
            f"sidecar.urls=('{served[0].url}',)",
            f"data.eval=('{records(tmp_path, 3)}',)",
            "evaluate.max_tasks=2",
            f"run.dir={tmp_path / 'run'}",
        ]
        assert main([part for setting in settings for part in ("--set", setting)]) == 0
    out = capsys.readouterr().out
    assert "2 held-out trajectories" in out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert " 1.000 " in rows["served"]
    assert " 0.000 " in rows["served, tools withheld"]
    assert " 0.000 " in rows["served, single turn"]
    assert "model.path is empty: what the sidecars serve was measured as it is." in out
    assert (tmp_path / "run" / "evaluation" / "report.html").is_file()


@pytest.mark.parametrize(("dry", "code"), [(["--dry_run"], 2), ([], 1)])
def test_files_that_are_not_there_are_named_before_anything_starts(
    tmp_path, monkeypatch, capsys, dry, code
):
    monkeypatch.chdir(tmp_path)
    settings = ["data.eval=('no.jsonl',)", "sidecar.tool_config=('no.yaml',)", "model.path=no"]
    settings += ["data.train=('not_read_here.jsonl',)"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    try:
        found = main([*arguments, *dry])
    except SystemExit as exit_:
        found = exit_.code
    assert found == code
    assert capsys.readouterr().err == (
        "tooljax.evaluate: data.eval: no.jsonl: no such file; sidecar.tool_config: no.yaml: no such file"
        f" (looked from {tmp_path})\n"
    )


def test_a_dry_run_asks_no_sidecar(tmp_path, capsys, caplog):
    settings = ["sidecar.urls=('http://127.0.0.1:9',)", f"data.eval=('{records(tmp_path, 1)}',)"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--dry_run"])
    assert exit_.value.code == 0
    assert "sidecar.urls = ('http://127.0.0.1:9',)" in capsys.readouterr().out
    assert "model.path" not in caplog.text  # the sidecars have it


def test_no_tasks_is_one_sentence(tokenizer, capsys):
    with serve(tokenizer, ["#### 1"]) as served:
        assert main(["--set", f"sidecar.urls=('{served[0].url}',)"]) == 1
        with (
            Sidecars([served[0].url], token=None, timeout_s=5.0) as sidecars,
            pytest.raises(ValueError, match=r"no held-out tasks .* name their files in data\.eval"),
        ):
            evaluate(small(), sidecars, [])
    assert "name their files in data.eval" in capsys.readouterr().err


def test_a_sidecar_that_fails_is_an_error_not_an_accuracy(tokenizer):
    with serve(tokenizer, honest(tokenizer), delay_s=20.0) as served:
        with (
            Sidecars([served[0].url], token=None, timeout_s=0.5) as sidecars,
            pytest.raises(SidecarError, match=r"did not finish within 0\.5 s"),
        ):
            evaluate(small(), sidecars, make_tasks(2))


def test_an_interrupted_evaluation_is_neither_an_accuracy_nor_a_crash(tokenizer, tmp_path, capsys):
    with serve(tokenizer, honest(tokenizer), delay_s=30.0) as served:
        killer = threading.Thread(target=interrupt_when_asked, args=[served[0]])
        killer.start()
        settings = [f"sidecar.urls=('{served[0].url}',)", f"data.eval=('{records(tmp_path, 2)}',)"]
        assert main([part for setting in settings for part in ("--set", setting)]) == 130
        killer.join()
        assert capsys.readouterr().err == "interrupted\n"
        # Within training, the step that was made is still logged and saved.
        with Sidecars([served[0].url], token=None, timeout_s=30.0) as sidecars:
            killer = threading.Thread(target=interrupt_when_asked, args=[served[0]])
            killer.start()
            run = SimpleNamespace(config=small(), sidecars=sidecars, held_out=make_tasks(2))
            assert Run.evaluate(run, 1) == {}  # type: ignore[arg-type]
            killer.join()
            assert sidecars.stop_requested


def interrupt_when_asked(served: Served) -> None:
    """SIGINT to this process, once the sidecar has something more to generate."""
    before, deadline = len(served.engine.requests), time.monotonic() + 20
    while len(served.engine.requests) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
