"""Traces of updates, with the names of their stages; and the work of updates, counted."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from update_cases import CONFIG, model, new_items, new_updater

from tooljax.batch import pack
from tooljax.config import Config, ConfigError, load_config
from tooljax.metrics import with_speed
from tooljax.model.flops import forward_flops, update_flops
from tooljax.profile import traced
from tooljax.work import Work, peak_flops


def configured(folder, steps: str = "(3, 4)") -> Config:
    return load_config([], [f"run.dir={folder}", f"profile.steps={steps}"])


def test_the_steps_asked_for_are_traced(tmp_path):
    config = configured(tmp_path)
    for step in (2, 3):
        with traced(config, step):
            jnp.ones(3).block_until_ready()
        assert (tmp_path / "profile").exists() == (step == 3)
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert b"update" in trace.read_bytes()


def test_operations_are_named_after_the_stages_of_an_update():
    updater = new_updater()
    (batch,) = pack(new_items((3,)), row_lengths=(16,), rows_multiple=1).microbatches(1)
    prepared = replace(batch, token_values={"weight": batch.advantages})
    programs = updater.lowered(jax.eval_shape(updater.init, model()[1]), prepared)
    written = {name: each.as_text(debug_info=True) for name, each in programs.items()}
    layers = ("embedding", "attention", "feed_forward", "head")
    for name, scopes in {
        "log-probs": ("log_probs", *layers),
        "gradients": ("gradients", *layers),
        "apply": ("apply",),
    }.items():
        # gradients/jvp(attention)/... where it is differentiated
        missing = [scope for scope in scopes if not re.search(rf"\b{scope}[/)]", written[name])]
        assert missing == [], name


def test_a_step_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"profile.steps=\(0, 4\): steps count from 1; write"):
        load_config([], ["profile.steps=(0, 4)"])


def test_an_update_counts_what_it_passes():
    updater, params = new_updater(), model()[1]
    updater.work.metrics(1.0)
    batch = pack(new_items((1, 2, 3)), row_lengths=(16,), rows_multiple=1)
    updater.log_probs(params, batch)
    # Three trajectories of 12 tokens: 78 pairs each, of which six tokens are in the loss.
    forward = forward_flops(CONFIG, 36, 3 * 78, 6)
    assert updater.work.flops == forward
    updater.update(updater.init(params), batch)
    assert updater.work.flops == forward + update_flops(CONFIG, 36, 3 * 78, 6)
    told = updater.work.metrics(2.0)
    assert told == {"perf/update_tflops": pytest.approx(4 * forward / 1e12)}  # a CPU has no MFU
    assert updater.work.metrics(2.0) == {"perf/update_tflops": 0.0}


def test_the_share_of_two_devices_rate():
    work = Work(SimpleNamespace(device_kind="TPU v5 lite"), 2, flops=197e12)
    # One second of one of two devices, in two seconds: a quarter.
    step = {"time/step_s": 4.0, "time/update_s": 2.0}
    told = with_speed(step, work.metrics)
    assert told == {**step, "perf/update_tflops": 197.0, "perf/mfu": 0.25}
    assert work.flops == 0


def test_devices_that_are_known():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("TPU v6 lite") == 918e12
    assert peak_flops("cpu") is None
