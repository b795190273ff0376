"""What /metrics says of tools, interactions and endings, and that the trainer's names say the same."""

import re

import pytest
from sidecar_cases import (
    CounterTool,
    EchoTool,
    PenaltyTool,
    RaisingTool,
    call,
    make_agent,
    make_task,
    play,
)

from rollout_sidecar.interactions.gsm8k import Gsm8kInteraction
from rollout_sidecar.metrics import HISTOGRAMS, Metrics
from rollout_sidecar.statistics import Facts, RecentTrajectories, facts, statistics
from tooljax.metrics import check_names, rollout_metrics

SAMPLE = re.compile(r'tooljax_sidecar_(\w+)(?:\{(\w+)="([^"]*)"\})? (\S+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """Value by name and label, of series with at most one label."""
    found = (SAMPLE.fullmatch(line) for line in text.splitlines())
    return {(m[1], m[3] or ""): float(m[4]) for m in found if m}


def test_a_histogram_is_written_as_prometheus_wants_it():
    metrics = Metrics()
    for seconds in (0.0004, 0.001, 0.3, 0.3, 100.0):
        metrics.observe("tool_call_seconds", seconds, tool='a"b')
    lines = [line for line in metrics.render().splitlines() if "tool_call_seconds" in line]
    assert lines[1] == "# TYPE tooljax_sidecar_tool_call_seconds histogram"
    buckets = dict(re.findall(r'le="([^"]+)"\} (\d+)', "\n".join(lines)))
    # Bounds are inclusive and counts cumulative.
    assert buckets["0.001"] == "2"
    assert buckets["0.25"] == "2"
    assert buckets["0.5"] == "4"
    assert buckets["60"] == "4"
    assert buckets["+Inf"] == "5"
    assert len(buckets) == len(HISTOGRAMS["tool_call_seconds"][1]) + 1
    assert lines[-2:] == [
        'tooljax_sidecar_tool_call_seconds_sum{tool="a\\"b"} 100.6014',
        'tooljax_sidecar_tool_call_seconds_count{tool="a\\"b"} 5',
    ]


async def test_the_gauges_of_the_sidecar_are_the_trainer_s_metrics(tiny_tokenizer):
    """Under the same names, worked out by the same code, from trajectories of both kinds."""
    agent = make_agent(tiny_tokenizer, [], CounterTool(), EchoTool(), RaisingTool("broken"))
    agent.interactions = {"gsm8k": Gsm8kInteraction({"name": "gsm8k"})}
    bad = '<tool_call>{"name": "counter", "arguments": {x:1}}</tool_call>'
    scripts = [
        [call("counter") * 2 + call("echo", text="x" * 90), "#### 2"],
        [bad, call("broken") + call("abacus"), "#### 3"],
        ["#### 3", "#### 2"],
        ["#### 2"],
    ]
    played = []
    for i, script in enumerate(scripts):
        agent.engine._script = script
        kwargs = {"name": "gsm8k", "ground_truth": "2"}
        with_user = {"interaction": "gsm8k", "interaction_kwargs": kwargs} if i == 2 else {}
        played.append(await play(agent, make_task(**with_user), max_tool_result_tokens=27))
    trained = rollout_metrics(played, tool_names=agent.tools)
    check_names(trained)
    served = samples(agent.metrics.render())
    compared = 0
    for name, value in trained.items():
        area, *middle, last = name.split("/")
        if area == "tools" and middle:
            key = (f"tool_{last}", middle[0])
        elif middle == ["status"]:
            key = ("rollout_status_frac", last.removesuffix("_frac"))
        else:
            key = (name.replace("/", "_"), "")
        if key in served:
            compared += 1
            assert served[key] == pytest.approx(value, rel=1e-12), name
        else:
            assert area not in ("tools", "interaction"), name
    assert compared > 40
    assert served["tool_truncated_rate", "echo"] == 1.0
    assert served["rollout_accuracy_with_tools", ""] == 0.5
    assert served["rollout_accuracy_without_tools", ""] == 1.0
    assert served["interaction_turn_score_mean", ""] == 0.5


async def test_counters_of_tools(tiny_tokenizer):
    agent = make_agent(
        tiny_tokenizer,
        [call("counter") + call("echo", text="y" * 90), "#### 2"],
        PenaltyTool(),
        EchoTool(),
    )
    for _ in range(2):
        await play(agent, max_tool_result_tokens=27)
    value = agent.metrics.value
    assert value("tool_calls_total", tool="echo", status="ok") == 2
    assert value("tool_trajectories_total", tool="echo") == 2
    assert value("tool_truncated_total", tool="echo") == 2
    assert value("tool_truncated_total", tool="counter") == 0
    assert value("tool_result_tokens_total", tool="echo") == 2 * 27
    text = agent.metrics.render()
    assert 'tooljax_sidecar_tool_call_seconds_count{tool="echo"} 2' in text
    assert 'tooljax_sidecar_tool_queue_seconds_count{tool="counter"} 2' in text
    assert samples(text)["tool_reward_sum", "counter"] == pytest.approx(-0.1)
    assert samples(text)["open_instances", ""] == 0


async def test_invented_names_make_no_series(tiny_tokenizer):
    script = [call(f"tool_{i}") for i in range(3)]
    agent = make_agent(tiny_tokenizer, script, CounterTool())
    await play(agent, max_invalid_turns=3)
    text = agent.metrics.render()
    assert "tool_0" not in text
    assert samples(text)["tool_calls", "unknown"] == 3


async def test_only_the_last_trajectories_count(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], CounterTool())
    agent.recent = RecentTrajectories(kept=2)
    await play(agent)
    agent.engine._script = ["#### 2"]
    await play(agent)
    assert samples(agent.metrics.render())["tools_use_rate", ""] == 0.5
    await play(agent)
    assert samples(agent.metrics.render())["tools_use_rate", ""] == 0.0


async def test_texts_are_not_kept(tiny_tokenizer):
    agent = make_agent(tiny_tokenizer, [call("echo", text="z" * 500), "#### 2"], EchoTool())
    await play(agent)
    (kept,) = agent.recent._played
    assert isinstance(kept, Facts)
    assert "zzz" not in repr(kept)
    assert kept.calls[0].result_tokens == 500


async def test_nothing_played_has_no_statistics(tiny_tokenizer):
    assert list(statistics([])) == []
    text = make_agent(tiny_tokenizer, [], CounterTool()).metrics.render()
    assert "tools_use_rate" not in text
    assert "nan" not in text.lower()


async def test_a_trajectory_that_failed_to_be_scored_has_no_accuracy(tiny_tokenizer, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(**kwargs):\n    raise KeyError('x')\n")
    agent = make_agent(tiny_tokenizer, ["#### 2"], reward=f"{file}:compute_score")
    assert facts(await play(agent)).accuracy is None
    assert "rollout_accuracy" not in agent.metrics.render()


async def test_what_a_tool_gives_for_the_trajectory_and_what_became_of_its_programs(tiny_tokenizer):
    class Sandbox(CounterTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return "stopped", 0.25, {"failed": 1.0, "timed_out": 1.0, "run_s": 10.0}

        async def calc_reward(self, instance_id, **kwargs):
            return 1.0

    agent = make_agent(tiny_tokenizer, [call("counter"), "#### 2"], Sandbox())
    trajectory = await play(agent)
    served = samples(agent.metrics.render())
    trained = rollout_metrics([trajectory])
    for name, value in (
        ("reward_sum", 1.25),
        ("reward_mean", 1.25),
        ("program_failure_rate", 1.0),
        ("program_timeout_rate", 1.0),
        ("error_rate", 0.0),
    ):
        assert served[f"tool_{name}", "counter"] == trained[f"tools/counter/{name}"] == value
