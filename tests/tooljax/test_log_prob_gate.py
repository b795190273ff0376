"""The log-prob gate against the embedded engine: the sound case, and faults that it must catch and name."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from flax import nnx
from gate_cases import TASKS, Trainer, make_config, make_folder, serve_model
from sampler_cases import trainer_log_probs, trainer_logits

from rollout_sidecar.client import SidecarError
from rollout_sidecar.engines.base import WeightTensor
from rollout_sidecar.protocol import Status, Trajectory, VersionSpan
from tooljax.config.schema import GateConfig, SamplingConfig
from tooljax.log_prob_gate import LogProbMismatch, _check_probes
from tooljax.metrics import check_names
from tooljax.rollouts import Sidecars
from tooljax.update import TrainState


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
def engine(served, monkeypatch):
    """The running engine; what a test changes of it is undone."""
    engine = served.sidecar.agent.engine

    def sampling(**changes):
        generate = type(engine).generate

        async def with_changes(request):
            params = msgspec.structs.replace(request.sampling, **changes)
            return await generate(engine, replace(request, sampling=params))

        monkeypatch.setattr(engine, "generate", with_changes)

    engine.sampling = sampling
    return engine


# --- sound ----------------------------------------------------------------------------------------------------------


def test_two_sound_sides_agree_to_rounding(folder, sidecars):
    trainer = Trainer.of(make_config(folder))
    verdict = trainer.look(sidecars)
    verdict.require()
    metrics = verdict.metrics
    check_names(metrics)
    # float32 rounds logits of size 10 to 1e-6: differences of 1e-6 give a KL of 1e-12 / 2.
    assert 0 <= metrics["gate/mean_kl"] < 1e-10
    assert metrics["gate/rms"] < 1e-5
    assert metrics["gate/max_abs"] < 1e-4
    assert metrics["gate/ess"] > 1 - 1e-9
    assert metrics["gate/within_1pct"] == metrics["gate/within_5pct"] == 1
    assert TASKS < metrics["gate/tokens"] <= 24 * TASKS
    assert abs(metrics["gate/truncation_z"]) < 4
    # The same probes every time, whatever the step.
    again = trainer.look(sidecars, step=1).metrics
    assert again == {name: metrics[name] for name in again}
    assert metrics.keys() - again.keys() == {"gate/truncation_z"}


def test_it_looks_at_the_first_push_and_every_so_many(folder, sidecars):
    config = make_config(folder, gate=GateConfig(every_pushes=3, prompts=1, max_tokens=4))
    trainer = Trainer.of(config)
    looked = [bool(trainer.look(sidecars, step).metrics) for step in (4, 5, 6, 7, 8, 9)]
    assert looked == [True, False, True, False, False, True]
    off = Trainer.of(make_config(folder, gate=GateConfig(every_pushes=0)))
    assert off.look(sidecars, step=10).metrics == {}


def test_limits_of_ones_own(folder, sidecars):
    tight = Trainer.of(make_config(folder, gate=GateConfig(prompts=2, max_rms=1e-12)))
    problem = tight.look(sidecars).problem
    assert "tensors that its engine holds are the trainer's to the byte" in problem
    assert "No experiment explains it" not in problem  # the trainer's own scoring does
    with pytest.raises(LogProbMismatch, match="log-prob gate: http://127"):
        Trainer.of(make_config(folder, gate=GateConfig(prompts=2, max_mean_kl=1e-30))).look(
            sidecars, step=1
        ).require()


# --- faults of computation ------------------------------------------------------------------------------------------


def test_a_trainer_that_forgets_the_temperature(folder, sidecars):
    """Pain point 9."""
    config = make_config(folder)
    forgets = replace(config, sampling=SamplingConfig(temperature=1.0))
    problem = Trainer.of(config, updater_config=forgets).look(sidecars).problem
    assert "tensors that its engine holds are the trainer's to the byte" in problem
    assert (
        "What explains it: the engine samples at sampling.temperature=0.7, and the trainer's own "
        "scoring is at another" in problem
    )


@pytest.mark.parametrize(("temperature", "named"), [(1.0, "1"), (0.5, "0.50"), (0.9, "0.90")])
def test_an_engine_at_another_temperature(folder, sidecars, engine, temperature, named):
    """Pain point 9."""
    engine.sampling(temperature=temperature)
    problem = Trainer.of(make_config(folder)).look(sidecars).problem
    assert (
        f"What explains it: the engine samples at temperature {named} instead of "
        "sampling.temperature=0.7" in problem
    )


@pytest.mark.parametrize(
    ("changes", "named"), [({"top_k": 4}, "top_k=4 "), ({"top_p": 0.8}, "top_p=0.80 ")]
)
def test_an_engine_that_truncates_and_reports_log_probs_of_what_it_kept(
    folder, sidecars, engine, changes, named
):
    """Pain point 9."""
    engine.sampling(**changes)
    problem = Trainer.of(make_config(folder)).look(sidecars).problem
    assert f"What explains it: the engine samples with {named}" in problem


def test_an_engine_that_truncates_and_reports_log_probs_of_everything(
    folder, sidecars, engine, monkeypatch
):
    """Pain point 9: ratios are all 1, and still the tokens are not drawn from what they are trained as."""
    trainer = Trainer.of(make_config(folder))
    engine.sampling(top_k=3)
    truncated = engine.generate

    async def whole_log_probs(request):
        result = await truncated(request)
        expected = trainer_log_probs(decoder, request.token_ids, result.token_ids, 0.7)
        return replace(result, log_probs=expected.tolist())

    decoder = nnx.merge(trainer.policy.graphdef, trainer.policy.params)
    monkeypatch.setattr(engine, "generate", whole_log_probs)
    verdict = trainer.look(sidecars)
    assert verdict.metrics["gate/mean_kl"] < 1e-9
    assert verdict.metrics["gate/truncation_z"] > 6
    with pytest.raises(LogProbMismatch, match="samples from a truncated distribution.*the 3 likel"):
        verdict.require()


def test_an_engine_that_rounds_its_logits(folder, sidecars, engine, monkeypatch):
    """Pain point 9: head precision."""
    trainer = Trainer.of(make_config(folder, gate=GateConfig(prompts=TASKS, max_mean_kl=1e-8)))
    decoder = nnx.merge(trainer.policy.graphdef, trainer.policy.params)
    exact = type(engine).generate

    async def rounded(request):
        result = await exact(engine, request)
        context, sampled = request.token_ids, result.token_ids
        logits = trainer_logits(decoder, [*context, *sampled])[len(context) - 1 : -1]
        coarse = jax.lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)
        log_probs = np.asarray(jax.nn.log_softmax(coarse / 0.7))
        return replace(result, log_probs=log_probs[np.arange(len(sampled)), sampled].tolist())

    monkeypatch.setattr(engine, "generate", rounded)
    problem = trainer.look(sidecars).problem
    assert "What explains it: the engine rounds its logits to bfloat16" in problem


def test_another_rotary_base(folder, sidecars, tmp_path):
    """The trainer's config.json says 500,000, the engine's 10,000."""
    other = make_folder(tmp_path / "other", rope_theta=500_000.0)
    problem = Trainer.of(make_config(other)).look(sidecars).problem
    assert (
        "What explains it: the engine's rotary base (rope_theta) is 10000 instead of 500000"
        in problem
    )


# --- faults of weights ----------------------------------------------------------------------------------------------


def changed_weights(state: TrainState, **factors: float) -> TrainState:
    """Weights of some names times factors."""

    def change(path, leaf):
        name = next((n for n in factors if f"'{n}'" in jax.tree_util.keystr(path)), None)
        return jnp.array(leaf, copy=True) * np.float32(factors.get(name or "", 1.0))

    return replace(state, params=jax.tree_util.tree_map_with_path(change, state.params))


def test_a_tensor_changed_behind_the_manifests_back(folder, served, sidecars, engine):
    trainer = Trainer.of(make_config(folder))
    trainer.push(sidecars)
    layers = engine._sampler.weights.layers
    layers[1]["w_up"] = layers[1]["w_up"] * 1.5
    problem = trainer.gate.look(sidecars, trainer.state, 0).problem
    assert (
        "Other weights: what its engine holds differs from the trainer's in mlp (1 tensors); the first is "
        "model.layers.1.mlp.up_proj.weight" in problem
    )


def test_weights_that_were_never_pushed(folder, sidecars):
    trainer = Trainer.of(make_config(folder))
    trainer.push(sidecars)
    newer = changed_weights(trainer.state, wq=1.5, final_norm=2.0)
    problem = trainer.gate.look(sidecars, newer, 0).problem
    assert "what was pushed to it differs from the trainer's in " in problem
    assert "attention q/k/v (2 tensors)" in problem
    assert "norms (1 tensors)" in problem
    assert "the first is model.layers.0.self_attn.q_proj.weight" in problem


@pytest.mark.parametrize(
    ("stale", "named"),
    [
        ("mlp", "the engine's mlp weights are as they were loaded"),
        ("lm_head", "the engine's head weights are as they were loaded"),
        ("", "the engine's weights are all as they were loaded: no push reached it"),
    ],
)
def test_a_group_that_pushes_do_not_reach(folder, sidecars, engine, monkeypatch, stale, named):
    """By an engine that cannot tell what it holds: only experiments can name the group."""
    load = engine.load_weights
    first: dict[str, WeightTensor] = {}

    async def keeps_some(tensors, version, changed=None):
        # The first push is what both sides were loaded with.
        for name, tensor in tensors.items():
            data = first.get(name) or replace(tensor, data=memoryview(bytes(tensor.data)))
            first[name] = data
        mixed = {n: first[n] if stale in n else tensor for n, tensor in tensors.items()}
        await load(mixed, version)

    async def cannot_tell(tensors):
        return None

    monkeypatch.setattr(engine, "load_weights", keeps_some)
    monkeypatch.setattr(engine, "altered_tensors", cannot_tell)
    trainer = Trainer.of(make_config(folder))
    trainer.push(sidecars)
    trainer.state = changed_weights(trainer.state, w_down=1.5, head=1.2)
    problem = trainer.look(sidecars, step=1).problem
    assert "what its engine made of them it cannot tell" in problem
    assert f"What explains it: {named}" in problem


# --- probes that say nothing ----------------------------------------------------------------------------------------


def probe(status: Status = "completed", sampled=True, version=3, error="") -> Trajectory:
    return Trajectory(
        task_index=0,
        sample_index=0,
        task_id="t",
        seed=0,
        status=status,
        error=error,
        token_ids=[1, 2],
        loss_mask=[False, sampled],
        rollout_log_probs=[0.0, -1.0],
        version_spans=[VersionSpan(start=1, end=2, policy_version=version)],
    )


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        ([probe(), probe("engine_error", error="it burns")], "gate: http://a: it burns"),
        (
            [probe("aborted", sampled=False, error="somebody asked")],
            "no token of 1 tasks; the first ended as aborted: somebody asked.*every_pushes = 0",
        ),
        ([], "sampled no token of 0 tasks; the first ended as nothing came back"),
        ([probe(version=2)], "with version 2 of the weights although version 3 was pushed"),
    ],
)
def test_probes_that_say_nothing(probes, message):
    with pytest.raises(SidecarError, match=message):
        _check_probes("http://a", probes, 3)


def test_prompts_that_are_too_long_stop_no_run(folder, sidecars, caplog):
    """They are rejected and counted, here as in training."""
    _check_probes("http://a", [probe("prompt_too_long", sampled=False)], 3)
    config = make_config(folder)
    short = replace(config.limits, max_prompt_tokens=1)
    trainer = Trainer.of(replace(config, limits=short))
    trainer.push(sidecars)
    verdict = trainer.gate.look(sidecars, trainer.state, 0)
    assert (verdict.metrics, verdict.problem) == ({}, "")
    assert "no look, its" in caplog.text


def test_a_look_is_not_interrupted(folder, sidecars):
    """A step that is made has all its metrics, so that a resumed run has the same."""
    trainer = Trainer.of(make_config(folder))
    trainer.push(sidecars)
    sidecars.stop_requested = True
    assert trainer.gate.look(sidecars, trainer.state, 0).metrics["gate/tokens"] > 0
