"""Training runs in this process: the gate's place in the loop, and an engine that shares its device with trainers."""

import json
from dataclasses import replace

import msgspec
import pytest
from gate_cases import make_config, make_folder, serve_model

from tooljax.checkpoint import Checkpointer
from tooljax.config.schema import (
    CheckpointConfig,
    DataConfig,
    GateConfig,
    GrpoConfig,
    RunConfig,
    SidecarConfig,
    TrackConfig,
)
from tooljax.log_prob_gate import LogProbMismatch
from tooljax.rollouts import Sidecars
from tooljax.train import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def served(folder):
    with serve_model(folder) as served:
        yield served


@pytest.fixture
def sidecars(served):
    with Sidecars([served.url], token=None, timeout_s=60.0) as sidecars:
        yield sidecars


@pytest.fixture
def config(folder, tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Problem {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(4)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return make_config(
        folder,
        run=RunConfig(dir=str(tmp_path / "run"), steps=3, progress="off"),
        data=DataConfig(train=(str(data),), prompts_per_step=2),
        grpo=GrpoConfig(group_size=2, kl_coef=0.0, zero_variance="keep"),
        track=TrackConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=50),
        gate=GateConfig(prompts=2, max_tokens=8),
    )


def rows(config) -> list[dict[str, float]]:
    file = f"{config.run.dir}/metrics.jsonl"
    with open(file) as lines:
        return [json.loads(line) for line in lines]


def test_a_run_that_goes_wrong_is_logged_and_saved_before_it_stops(
    config, served, sidecars, monkeypatch
):
    engine = served.sidecar.agent.engine
    generate = type(engine).generate

    async def wrong_from_version_2_on(request):
        sampling = request.sampling
        if engine.policy_version >= sidecars.version_of(2):
            sampling = msgspec.structs.replace(sampling, temperature=1.0)
        return await generate(engine, replace(request, sampling=sampling))

    monkeypatch.setattr(engine, "generate", wrong_from_version_2_on)
    with pytest.raises(LogProbMismatch, match="the engine samples at temperature 1 instead of"):
        train(config, sidecars)
    logged = rows(config)
    assert [row["step"] for row in logged] == [1, 2]
    assert logged[0]["gate/mean_kl"] < 1e-9
    assert logged[1]["gate/mean_kl"] > 1e-3
    checkpointer = Checkpointer(f"{config.run.dir}/checkpoints", keep=1)
    assert checkpointer.latest_step() == 2
    # With that mended, the run goes on.
    monkeypatch.undo()
    assert train(config, sidecars) == 3
    assert [row["step"] for row in rows(config)] == [1, 2, 3]


def test_engine_memory_is_released_for_each_update(config, served, sidecars, monkeypatch):
    """And a run finds the engine as one that died left it."""
    engine = served.sidecar.agent.engine
    served.do(engine.release_memory())
    log = []

    def logged(name):
        method = getattr(type(engine), name)

        async def call(*args):
            log.append(name)
            return await method(engine, *args)

        monkeypatch.setattr(engine, name, call)

    for name in ("release_memory", "resume_memory", "load_weights"):
        logged(name)
    shared = replace(config, sidecar=SidecarConfig(max_model_tokens=128, share_gpu=True))
    assert train(shared, sidecars) == 3
    step = ["release_memory", "resume_memory", "load_weights"]
    assert log == [*step[1:], *3 * step]
    assert engine.fault == ""
    # The weights that came back are those that were trained.
    assert all(row["gate/mean_kl"] < 1e-9 for row in rows(config))
