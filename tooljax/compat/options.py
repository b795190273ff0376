"""verl's options as settings of ours."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_origin

from rollout_sidecar.formats import get_format
from rollout_sidecar.profiles import get_profile
from tooljax.compat.option_files import is_unfilled
from tooljax.compat.points import PROFILE_FIELD
from tooljax.config import Config
from tooljax.config.checks import check
from tooljax.config.errors import ConfigError
from tooljax.config.gin import SECTIONS, section_of, with_section
from tooljax.config.values import WrongValue, convert

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
TURNS = f"{ROLLOUT}.multi_turn"


class Cannot(Exception):
    """The option has a value that cannot run here; the message says why, and what to do."""


class Left(Exception):
    """The option's value needs no setting; the message says why."""


@dataclass(frozen=True)
class Option:
    """One option of verl."""

    name: str
    field: str = ""
    """Our setting; "" where there is none, and `read` or `note` says why."""
    read: Callable[[Any], Any] = lambda value: value
    """Our value for verl's. Raises Cannot."""
    note: str = ""


def _only(*allowed: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in allowed:
            only = f"; {' and '.join(map(repr, allowed))} can run" if allowed else ""
            raise Cannot(f"{value!r} is not supported{only}")
        return value

    return read


def _files(value: Any) -> list[str]:
    return [str(file) for file in (value if isinstance(value, list) else [value])]


def _every(what: str) -> Callable[[Any], int]:
    """Steps between two of something; verl's -1 means never."""

    def read(value: Any) -> int:
        if int(value) < 1:
            raise Left(f"{value} means never; {what}")
        return int(value)

    return read


def _count(value: Any) -> int:
    """A number of things that verl writes as -1 where it means all."""
    return max(0, int(value))


def _remat(value: Any) -> str:
    """verl computes whole layers again, or nothing."""
    return "full" if value else "none"


def _text(value: Any) -> str:
    """Text that verl leaves out by writing null."""
    if value is None:
        raise Left("null is none, as here")
    return str(value)


_DERIVED = {"limits.max_turns"}
"""Settings that a combination of options overrules."""

_COMPUTED = "computed with others, below"
_ENGINE = "a matter of verl's engine"

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("data.train_files", "data.train", _files),
        Option("data.val_files", "data.eval", _files),
        Option("data.train_batch_size", "data.prompts_per_step", int),
        Option("data.train_max_samples", "data.max_rows", _count),
        Option("data.max_prompt_length", "limits.max_prompt_tokens", int),
        Option("data.max_response_length", note=_COMPUTED),
        Option("data.shuffle", "data.shuffle", bool),
        Option("data.seed", "run.seed", int),
        Option("data.prompt_key", "data.prompt_key", str),
        Option("data.reward_fn_key", "data.reward_key", str),
        Option("data.truncation", note="prompts are never cut; longer ones are rejected and counted"),
        Option("data.filter_overlong_prompts", note="longer prompts are rejected and counted"),
        Option("data.return_raw_chat", note="messages are always kept"),
        Option("data.custom_cls.path", read=_only()),
        Option("data.sampler.class_path", "curriculum.class_path", _text),
        Option("data.sampler.class_name", "curriculum.class_name", _text),
        Option("actor_rollout_ref.model.path", "model.path", str),
        Option("actor_rollout_ref.model.enable_gradient_checkpointing", "model.remat", _remat),
        Option(f"{ROLLOUT}.n", "grpo.group_size", int),
        Option(f"{ROLLOUT}.temperature", "sampling.temperature", float),
        Option(f"{ROLLOUT}.top_p", "sampling.top_p", float),
        Option(f"{ROLLOUT}.top_k", "sampling.top_k", _count),
        Option(f"{ROLLOUT}.dtype", "model.dtype", str),
        Option(f"{ROLLOUT}.max_model_len", "sidecar.max_model_tokens", int),
        Option(f"{ROLLOUT}.val_kwargs.temperature", "evaluate.temperature", float),
        Option(f"{ROLLOUT}.val_kwargs.n", "evaluate.samples", int),
        Option(f"{ROLLOUT}.calculate_log_probs", note="log-probs of sampling are always recorded"),
        Option(f"{ROLLOUT}.over_sample_rate", note="every rollout that was asked for is finished"),
        Option(f"{ROLLOUT}.name", note=_ENGINE),
        Option(f"{ROLLOUT}.mode", note=_ENGINE),
        Option(f"{ROLLOUT}.agent.agent_loop_config_path", read=_only()),
        Option(f"{ROLLOUT}.agent.default_agent_loop", read=_only("tool_agent", "single_turn_agent")),
        Option(f"{ROLLOUT}.agent.num_workers", note="the sidecar is one event loop"),
        Option(f"{TURNS}.enable", note="tools are used where there are any"),
        Option(f"{TURNS}.max_assistant_turns", "limits.max_turns", int),
        Option(f"{TURNS}.max_user_turns", note=_COMPUTED),
        Option(f"{TURNS}.max_parallel_calls", "limits.max_parallel_calls", int),
        Option(
            f"{TURNS}.max_tool_response_length",
            "sidecar.max_tool_response_length",
            int,
            "in characters; limits.max_tool_result_tokens bounds the tokens",
        ),
        Option(f"{TURNS}.tool_response_truncate_side", "sidecar.truncate_side", str),
        Option(f"{TURNS}.format", "sidecar.tool_format", lambda name: get_format(name).name),
        Option(f"{TURNS}.tool_config_path", "sidecar.tool_config", str),
        Option(f"{TURNS}.function_tool_path", "sidecar.tool_config", str),
        Option(f"{TURNS}.interaction_config_path", "sidecar.interaction_config", str),
        Option(f"{TURNS}.use_inference_chat_template", note="see sidecar.context_policy"),
        Option(f"{TURNS}.tokenization_sanity_check_mode", note="sampled tokens are never tokenised again"),
        Option(f"{ACTOR}.optim.lr", "optimizer.learning_rate", float),
        Option(f"{ACTOR}.optim.lr_warmup_steps", "optimizer.warmup_steps", _count),
        Option(f"{ACTOR}.optim.weight_decay", "optimizer.weight_decay", float),
        Option(f"{ACTOR}.grad_clip", "optimizer.clip_norm", float),
        Option(f"{ACTOR}.clip_ratio", note=_COMPUTED),
        Option(f"{ACTOR}.clip_ratio_low", "grpo.clip_low", float),
        Option(f"{ACTOR}.clip_ratio_high", "grpo.clip_high", float),
        Option(f"{ACTOR}.use_kl_loss", note=_COMPUTED),
        Option(f"{ACTOR}.kl_loss_coef", note=_COMPUTED),
        Option(f"{ACTOR}.kl_loss_type", read=_only("low_var_kl", "k3")),
        Option(f"{ACTOR}.entropy_coeff", read=_only(0, 0.0)),
        Option(f"{ACTOR}.loss_agg_mode", read=_only("token-mean")),
        Option(f"{ACTOR}.policy_loss.loss_mode", read=_only("vanilla")),
        Option(f"{ACTOR}.ppo_epochs", "grpo.updates_per_batch", int),
        Option(f"{ACTOR}.ppo_mini_batch_size", note="each update is on the whole batch of a step"),
        Option("algorithm.adv_estimator", read=_only("grpo")),
        Option("algorithm.norm_adv_by_std_in_grpo", "grpo.scale_by_std", bool),
        Option("algorithm.use_kl_in_reward", read=_only(False)),
        Option("algorithm.filter_groups.enable", read=_only(False)),
        Option("custom_reward_function.path", note=_COMPUTED),
        Option("custom_reward_function.name", note=_COMPUTED),
        Option("reward_model.enable", read=_only(False)),
        Option("trainer.total_training_steps", "run.steps", int),
        Option("trainer.total_epochs", note="a run is as long as run.steps says"),
        Option(
            "trainer.save_freq",
            "checkpoint.every_steps",
            _every("here the last step is always saved, and others as checkpoint.every_steps says"),
        ),
        Option("trainer.test_freq", "evaluate.every_steps", _count),
        Option("trainer.default_local_dir", "run.dir", str),
        Option("trainer.project_name", "track.project", str),
        Option("trainer.experiment_name", note="the name of run.dir"),
        Option("trainer.logger", note=_COMPUTED),
    )
}  # fmt: skip
"""verl's options that mean something here."""


_DEFAULTS = (
    ("grpo.kl_coef", 0.0),
    ("optimizer.warmup_steps", 0),
    ("optimizer.b2", 0.999),
)
"""Settings whose default differs from verl's, which holds for a run that was configured there."""


@dataclass
class Translation:
    """What became of the options of some files."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Ours."""
    origins: dict[str, str] = field(default_factory=dict)
    """By setting: the option it came from, with its value."""
    notes: dict[str, str] = field(default_factory=dict)
    """By option: why it has no setting."""
    problems: dict[str, str] = field(default_factory=dict)
    """By option: why it cannot run here."""
    unused: list[str] = field(default_factory=list)
    """Options that are not in the table."""
    values: dict[str, Any] = field(default_factory=dict)
    """Those that are, by their full names."""


def translate(options: Mapping[str, Any], profile: str = "default") -> Translation:
    """Our settings for verl's options, by dotted name; a name may leave out the beginning, as parts of files do."""
    done = Translation()
    for name, value in options.items():
        full = full_name(name)
        if full is None:
            done.unused.append(name)
        elif value is not None:
            done.values[full] = value  # of two spellings of one option the later wins
    for full, value in done.values.items():
        _translate_one(OPTIONS[full], value, done)
    for setting, value, origin in _combined(done.values, profile):
        _set(setting, value, origin, done)
    if any(name.startswith("actor_rollout_ref.") for name in done.values):
        for setting, value in _DEFAULTS:
            if setting not in done.settings:
                _set(setting, value, "verl's default", done)
    if done.settings.get("evaluate.every_steps") and not done.settings.get("data.eval"):
        del done.settings["evaluate.every_steps"]
        done.notes["trainer.test_freq"] = "no data.val_files, so there is nothing to evaluate on"
    if profile != "default":
        _set(PROFILE_FIELD, profile, "--profile", done)
        _set("reward.text", get_profile(profile).solution_text, "--profile", done)
    return done


def contradictions(done: Translation) -> list[str]:
    """What no run could have at once among the settings, and the defaults of the others."""
    config = Config()
    for setting, value in done.settings.items():
        section, _, name = setting.partition(".")
        part = dataclasses.replace(section_of(config, section), **{name: value})
        config = with_section(config, section, part)
    try:
        check(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def full_name(name: str) -> str | None:
    """The option of the table that a name means; None if there is none, or more than one."""
    found = [full for full in OPTIONS if full == name or full.endswith(f".{name}")]
    return found[0] if len(found) == 1 else None


def _translate_one(option: Option, value: Any, done: Translation) -> None:
    if is_unfilled(value):
        done.problems[option.name] = f"{value!r} is filled in by verl; write the value itself"
        return
    try:
        value = option.read(value)
    except Cannot as error:
        done.problems[option.name] = str(error)
        return
    except Left as error:
        done.notes[option.name] = str(error)
        return
    except (TypeError, ValueError) as error:
        done.problems[option.name] = f"{value!r} cannot be read: {error}"
        return
    if option.field:
        _set(option.field, value, f"{option.name}", done, option.note)
    elif option.note != _COMPUTED:
        done.notes[option.name] = option.note or "as it is here"


def _set(setting: str, value: Any, origin: str, done: Translation, note: str = "") -> None:
    section, _, name = setting.partition(".")
    hint = SECTIONS.get(section, {}).get(name)
    if hint is None:
        flag = f"--{name} {value}"
        done.notes[origin] = f"no field of the config; a sidecar of its own takes it as {flag}"
        return
    if get_origin(hint) is tuple and not isinstance(value, list | tuple):
        value = (*done.settings.get(setting, ()), value)
    elif setting in done.settings and value != done.settings[setting]:
        if setting not in _DERIVED:
            done.problems[origin] = f"{setting} is already {done.settings[setting]!r}"
            return
    try:
        done.settings[setting] = convert(value, hint)
        done.origins[setting] = f"{origin}{f' ({note})' if note else ''}"
    except WrongValue as error:
        done.problems[origin] = f"{setting} cannot be {error}"


def _combined(values: Mapping[str, Any], profile: str) -> Iterator[tuple[str, Any, str]]:
    """Settings that depend on more than one option."""
    response = values.get("data.max_response_length")
    if response is not None:
        yield from _lengths(values, int(response))
    turns = values.get(f"{TURNS}.max_user_turns")
    if turns is not None and profile in ("B", "C"):
        # There a round of tools is a user turn, and one more assistant turn follows the last.
        assistant = values.get(f"{TURNS}.max_assistant_turns", int(turns) + 1)
        yield (
            "limits.max_turns",
            min(int(turns) + 1, int(assistant)),
            f"{TURNS}.max_user_turns + 1",
        )
    if profile in ("B", "C") and f"{TURNS}.max_parallel_calls" not in values:
        if any(name.startswith(TURNS) for name in values):
            yield "limits.max_parallel_calls", 1, "verl's default"
    ratio = values.get(f"{ACTOR}.clip_ratio")
    for side in ("low", "high"):
        if ratio is not None and f"{ACTOR}.clip_ratio_{side}" not in values:
            yield f"grpo.clip_{side}", float(ratio), f"{ACTOR}.clip_ratio"
    if f"{ACTOR}.use_kl_loss" in values or f"{ACTOR}.kl_loss_coef" in values:
        used = values.get(f"{ACTOR}.use_kl_loss", False)
        coefficient = float(values.get(f"{ACTOR}.kl_loss_coef", 0.001)) if used else 0.0
        yield "grpo.kl_coef", coefficient, f"{ACTOR}.use_kl_loss and kl_loss_coef"
    path = values.get("custom_reward_function.path")
    if path is not None:
        name = values.get("custom_reward_function.name", "compute_score")
        yield "reward.function", f"{path}:{name}", "custom_reward_function.path and name"
    loggers = values.get("trainer.logger")
    for tracker in ("tensorboard", "mlflow", "wandb"):
        if loggers is not None:
            yield f"track.{tracker}", tracker in _files(loggers), "trainer.logger"


def _lengths(values: Mapping[str, Any], response: int) -> Iterator[tuple[str, Any, str]]:
    prompt = values.get("data.max_prompt_length")
    if prompt is None:
        prompt = 512
        yield "limits.max_prompt_tokens", prompt, "verl's default"
    both = "data.max_prompt_length + data.max_response_length"
    longest = int(prompt) + response
    yield "limits.max_trajectory_tokens", longest, both
    # There one turn may take all of it.
    yield "limits.max_tokens_per_turn", response, "data.max_response_length"
    default = Config()
    if longest > default.batch.row_lengths[-1]:
        yield "batch.row_lengths", (longest // 4, longest // 2, longest), both
    if longest > default.sidecar.max_model_tokens and f"{ROLLOUT}.max_model_len" not in values:
        yield "sidecar.max_model_tokens", longest, both
