"""verl's options as our settings: the table, scripts and YAML, and what the .gin file says."""

import pytest

from tooljax.compat.option_files import read_script_options
from tooljax.compat.options import OPTIONS, Cannot, contradictions, full_name, translate
from tooljax.compat.report import make_report, to_gin
from tooljax.config import load_config
from tooljax.config.gin import SECTIONS

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("name", "value", "setting", "ours"),
    [
        ("data.train_files", "a.parquet", "data.train", ("a.parquet",)),
        ("data.val_files", ["a.parquet", "b.parquet"], "data.eval", ("a.parquet", "b.parquet")),
        ("data.train_batch_size", 256, "data.prompts_per_step", 256),
        ("data.max_prompt_length", 1024, "limits.max_prompt_tokens", 1024),
        ("data.train_max_samples", -1, "data.max_rows", 0),
        ("data.shuffle", False, "data.shuffle", False),
        (f"{ROLLOUT}.n", 16, "grpo.group_size", 16),
        (f"{ROLLOUT}.temperature", 1, "sampling.temperature", 1.0),
        (f"{ROLLOUT}.top_k", -1, "sampling.top_k", 0),
        (f"{ROLLOUT}.max_model_len", 8192, "sidecar.max_model_tokens", 8192),
        (f"{ROLLOUT}.val_kwargs.n", 4, "evaluate.samples", 4),
        (f"{TURNS}.max_assistant_turns", 5, "limits.max_turns", 5),
        (f"{TURNS}.max_parallel_calls", 2, "limits.max_parallel_calls", 2),
        (f"{TURNS}.format", "hermes", "sidecar.tool_format", "hermes"),
        (f"{TURNS}.format", "qwen25", "sidecar.tool_format", "hermes"),
        (f"{ACTOR}.optim.lr", 1e-6, "optimizer.learning_rate", 1e-6),
        (f"{ACTOR}.optim.lr_warmup_steps", -1, "optimizer.warmup_steps", 0),
        (f"{ACTOR}.grad_clip", 0.5, "optimizer.clip_norm", 0.5),
        (f"{ACTOR}.clip_ratio_high", 0.28, "grpo.clip_high", 0.28),
        ("algorithm.norm_adv_by_std_in_grpo", False, "grpo.scale_by_std", False),
        ("trainer.total_training_steps", 100, "run.steps", 100),
        ("trainer.save_freq", 20, "checkpoint.every_steps", 20),
        ("trainer.test_freq", -1, "evaluate.every_steps", 0),
        ("trainer.default_local_dir", "runs/x", "run.dir", "runs/x"),
    ],
)
def test_an_option_is_a_setting(name, value, setting, ours):
    done = translate({name: value})
    assert done.settings[setting] == ours
    assert done.origins[setting].startswith(name)
    assert (done.problems, done.unused) == ({}, [])


def test_settings_that_depend_on_several_options():
    done = translate(
        {
            "data.max_prompt_length": 1024,
            "data.max_response_length": 3000,
            f"{ACTOR}.clip_ratio": 0.1,
            f"{ACTOR}.clip_ratio_high": 0.3,
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": 0.01,
            "custom_reward_function.path": "my/reward.py",
            "trainer.logger": ["console", "mlflow"],
        }
    )
    assert done.settings == {
        "limits.max_prompt_tokens": 1024,
        "limits.max_trajectory_tokens": 4024,
        "limits.max_tokens_per_turn": 3000,
        "grpo.clip_low": 0.1,
        "grpo.clip_high": 0.3,
        "grpo.kl_coef": 0.01,
        "reward.function": "my/reward.py:compute_score",
        "track.tensorboard": False,
        "track.mlflow": True,
        "track.wandb": False,
        # verl's defaults where ours are others.
        "optimizer.warmup_steps": 0,
        "optimizer.b2": 0.999,
    }


def test_what_a_long_response_needs_is_set_too():
    done = translate({"data.max_response_length": 8192})
    assert done.settings == {
        "limits.max_prompt_tokens": 512,  # verl's default
        "limits.max_trajectory_tokens": 8704,
        "limits.max_tokens_per_turn": 8192,
        "batch.row_lengths": (2176, 4352, 8704),
        "sidecar.max_model_tokens": 8704,
    }
    assert contradictions(done) == []
    done = translate({"data.max_response_length": 8192, f"{ROLLOUT}.max_model_len": 6000})
    (problem,) = contradictions(done)
    assert "limits.max_trajectory_tokens=8704 is above sidecar.max_model_tokens=6000" in problem


def test_evaluations_without_a_file_are_none():
    done = translate({"trainer.test_freq": 20})
    assert done.settings == {}
    assert done.notes == {
        "trainer.test_freq": "no data.val_files, so there is nothing to evaluate on"
    }
    done = translate({"trainer.test_freq": 20, "data.val_files": "a.parquet"})
    assert done.settings["evaluate.every_steps"] == 20


def test_a_kl_coefficient_without_the_kl_loss_is_none():
    assert translate({f"{ACTOR}.kl_loss_coef": 0.01}).settings["grpo.kl_coef"] == 0.0
    assert translate({f"{ACTOR}.optim.lr": 1e-6}).settings["grpo.kl_coef"] == 0.0


def test_user_turns_bound_the_turns_where_rounds_of_tools_count_as_such():
    options = {f"{TURNS}.max_user_turns": 3, f"{TURNS}.max_assistant_turns": 8}
    # After the third round of tools one more turn is sampled, then the trajectory stops.
    assert translate(options, "B").settings["limits.max_turns"] == 4
    assert translate(options, "A").settings["limits.max_turns"] == 8
    assert translate({f"{TURNS}.max_user_turns": 3}, "C").settings["limits.max_turns"] == 4


def test_verls_limit_of_one_call_a_turn_holds_where_verl_had_it():
    options = {f"{TURNS}.enable": True}
    assert translate(options, "B").settings["limits.max_parallel_calls"] == 1
    assert "limits.max_parallel_calls" not in translate(options, "A").settings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("algorithm.adv_estimator", "gae", "'gae' is not supported; 'grpo' can run"),
        (f"{ACTOR}.kl_loss_type", "mse", "'mse' is not supported; 'low_var_kl' and 'k3' can run"),
        ("data.custom_cls.path", "x.py", "'x.py' is not supported"),
        (f"{ROLLOUT}.n", "many", "'many' cannot be read"),
        (f"{ROLLOUT}.n", 1, "grpo.group_size cannot be 1 (int)"),
        ("data.train_files", "$DATA/x.parquet", "is filled in by verl; write the value itself"),
        ("data.train_files", ["${oc.env:X}/x"], "is filled in by verl"),
    ],
)
def test_what_cannot_run_is_named(name, value, message):
    (found,) = translate({name: value}).problems.items()
    assert found[0] == name
    assert message in found[1]


def test_names_may_leave_out_their_beginning():
    assert full_name("multi_turn.max_assistant_turns") == f"{TURNS}.max_assistant_turns"
    assert full_name("max_assistant_turns") == f"{TURNS}.max_assistant_turns"
    assert full_name("rollout.n") == f"{ROLLOUT}.n"
    assert full_name("n") is None  # also val_kwargs.n
    assert full_name("assistant_turns") is None
    # Of two spellings the later wins.
    done = translate({"max_assistant_turns": 3, f"{TURNS}.max_assistant_turns": 4})
    assert (done.settings["limits.max_turns"], done.problems) == (4, {})


def test_options_that_mean_nothing_here_are_listed_and_none_is_absent():
    done = translate({"trainer.nnodes": 1, f"{TURNS}.max_parallel_calls": None})
    assert (done.unused, done.settings) == (["trainer.nnodes"], {})


def test_every_option_has_a_setting_or_says_why_not():
    flags = {"sidecar.max_tool_response_length", "sidecar.truncate_side"}
    for option in OPTIONS.values():
        section, _, name = option.field.partition(".")
        assert not option.field or name in SECTIONS[section] or option.field in flags, option
        if not option.field and not option.note:
            with pytest.raises(Cannot, match="is not supported"):
                option.read("something else")


def test_what_only_the_sidecar_takes_is_named_as_its_flag(monkeypatch):
    name = f"{TURNS}.tool_response_truncate_side"
    monkeypatch.setattr("tooljax.compat.options.SECTIONS", {})
    assert translate({name: "left"}).notes[name] == (
        "no field of the config; a sidecar of its own takes it as --truncate_side left"
    )


def test_a_profile_brings_what_rewards_read():
    assert translate({}, "B").settings == {"sidecar.profile": "B", "reward.text": "all"}
    assert translate({}).settings == {}


def test_a_launch_script_with_its_variables(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\n"
        "# actor_rollout_ref.rollout.n=3 is a comment\n"
        "set -x\n"
        'export BASE="${BASE:-/data}"; LEN=512\n'
        "HOME_DIR=$MY_HOME\n"
        "python3 -m verl.trainer.main_ppo --config-name='x' \\\n"
        "    data.train_files=\"['$BASE/a.parquet','$HOME_DIR/b.parquet']\" \\\n"
        "    +data.max_prompt_length=${LEN} \\\n"
        "    actor_rollout_ref.actor.optim.lr=1e-6 trainer.logger='[console,wandb]' \\\n"
        "    actor_rollout_ref.model.path=$UNKNOWN data.shuffle=False $@\n"
    )
    assert read_script_options(script, {"MY_HOME": "/me"}) == {
        "data.train_files": ["/data/a.parquet", "/me/b.parquet"],
        "data.max_prompt_length": 512,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.logger": ["console", "wandb"],
        "actor_rollout_ref.model.path": "$UNKNOWN",
        "data.shuffle": False,
    }
    script.write_text("python3 a.b='x\n")
    with pytest.raises(ValueError, match=r"run\.sh: No closing quotation: python3 a\.b='x"):
        read_script_options(script, {})


def test_the_gin_file_can_be_read_and_holds_everything_else_as_comments(tmp_path):
    options = tmp_path / "multi_turn.yaml"
    options.write_text(
        "actor_rollout_ref:\n"
        "  rollout: {n: 4, multi_turn: {enable: true, max_assistant_turns: 5, format: qwen25}}\n"
        "  actor: {optim: {lr: 1e-6}, strategy: fsdp}\n"
        "algorithm: {adv_estimator: gae}\n"
    )
    report = make_report([options])
    text = to_gin(report)
    assert text.startswith(f"# from {options}\n")
    assert (
        "limits.max_turns = 5  # actor_rollout_ref.rollout.multi_turn.max_assistant_turns\n" in text
    )
    assert (
        "# cannot run here: algorithm.adv_estimator: 'gae' is not supported; 'grpo' can run\n"
        in text
    )
    assert "# no setting: actor_rollout_ref.rollout.multi_turn.enable: tools are used where" in text
    assert "# not used here: actor_rollout_ref.actor.strategy\n" in text
    gin = tmp_path / "run.gin"
    gin.write_text(text)
    config = load_config([gin])
    assert (config.grpo.group_size, config.limits.max_turns) == (4, 5)
    assert (config.optimizer.learning_rate, config.grpo.kl_coef) == (1e-6, 0.0)
