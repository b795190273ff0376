"""What must hold between settings, beyond the type of each: asked of every config that is read."""

import json
from collections.abc import Iterator, Mapping

from tooljax.config.algorithm_checks import algorithm_problems
from tooljax.config.asynchronous import async_problems
from tooljax.config.curriculum import curriculum_problems
from tooljax.config.errors import ConfigError
from tooljax.config.lora import lora_problems
from tooljax.config.profile import profile_problems
from tooljax.config.schema import Config

Problem = tuple[tuple[str, ...], str]
"""The fields that contradict each other, and the sentence that says so."""


def check(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Raises one ConfigError with every contradiction between settings.

    `origins` says where a field was set (`configs/x.gin:3`); each sentence starts with it.
    """
    lines = []
    for fields, sentence in _problems(config):
        places = [place for field in fields if (place := (origins or {}).get(field))]
        lines.append(
            ": ".join([", ".join(dict.fromkeys(places)), sentence] if places else [sentence])
        )
    if lines:
        raise ConfigError("\n".join(lines))


def reason(field: str, value: object) -> str | None:
    """Why the value of one field is wrong, where the type alone would not explain it."""
    if field == "grpo.group_size" and type(value) is int and value == 1:
        return (
            "group_size=1 gives every advantage 0; GRPO needs group_size >= 2 (set grpo.group_size)"
        )
    return None


def _problems(config: Config) -> Iterator[Problem]:
    if sentence := reason("grpo.group_size", config.grpo.group_size):
        yield ("grpo.group_size",), sentence
    yield from algorithm_problems(config.grpo)
    yield from curriculum_problems(config.curriculum)
    yield from profile_problems(config.profile)
    yield from async_problems(config)
    yield from lora_problems(config.lora)
    yield from _sampling(config)
    yield from _lengths(config)
    yield from _row_lengths(config)
    yield from _reward(config)
    yield from _mesh(config)
    if config.optimizer.rounding == "stochastic" and config.model.dtype == "float32":
        yield (
            ("optimizer.rounding", "model.dtype"),
            "optimizer.rounding='stochastic' is of bfloat16 weights, and model.dtype='float32' rounds nothing; set "
            "optimizer.rounding = 'master', or model.dtype = 'bfloat16'",
        )
    if config.evaluate.every_steps and not config.data.eval:
        yield (
            ("evaluate.every_steps", "data.eval"),
            f"evaluate.every_steps={config.evaluate.every_steps} but data.eval names no file; "
            "set data.eval, or evaluate.every_steps = 0",
        )
    low, high = config.guard.min_entropy, config.guard.max_entropy
    if high and low >= high:
        yield (
            ("guard.min_entropy", "guard.max_entropy"),
            f"guard.min_entropy={low:g} is not below guard.max_entropy={high:g}, so every step is an alarm; "
            "raise the second, or set it to 0 for no limit",
        )


def _sampling(config: Config) -> Iterator[Problem]:
    sampling = config.sampling
    if sampling.temperature == 0:
        yield (
            ("sampling.temperature",),
            "sampling.temperature=0 makes the trajectories of a group equal, so every advantage is 0; "
            "set sampling.temperature above 0 (evaluate.temperature may be 0)",
        )
    for name, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != off:
            yield (
                (f"sampling.{name}",),
                f"sampling.{name}={value} samples from a truncated support, which the trainer does not "
                f"replay yet, so its log-probs would be of another distribution; set sampling.{name} = {off}",
            )


def _reward(config: Config) -> Iterator[Problem]:
    reward, longest = config.reward, config.limits.max_trajectory_tokens
    if reward.function_kwargs:
        try:
            kwargs = json.loads(reward.function_kwargs)
        except ValueError:
            kwargs = None
        if not isinstance(kwargs, dict):
            yield (
                ("reward.function_kwargs",),
                f"reward.function_kwargs={reward.function_kwargs!r} is not a JSON object; write for example "
                """'{"format_score": 0.1}'""",
            )
    if reward.overlong and not 0 < reward.overlong_buffer_tokens < longest:
        yield (
            ("reward.overlong", "reward.overlong_buffer_tokens", "limits.max_trajectory_tokens"),
            f"reward.overlong={reward.overlong:g} needs reward.overlong_buffer_tokens from 1 to below "
            f"limits.max_trajectory_tokens={longest}, got {reward.overlong_buffer_tokens}; "
            f"set it, for example to {max(longest // 5, 1)}",
        )


def _lengths(config: Config) -> Iterator[Problem]:
    limits, sidecar = config.limits, config.sidecar
    if limits.max_prompt_tokens >= limits.max_trajectory_tokens:
        yield (
            ("limits.max_prompt_tokens", "limits.max_trajectory_tokens"),
            f"limits.max_prompt_tokens={limits.max_prompt_tokens} must be below "
            f"limits.max_trajectory_tokens={limits.max_trajectory_tokens}: "
            "the longest prompt would leave no room for a completion",
        )
    if not sidecar.urls and limits.max_trajectory_tokens > sidecar.max_model_tokens:
        yield (
            ("limits.max_trajectory_tokens", "sidecar.max_model_tokens"),
            f"limits.max_trajectory_tokens={limits.max_trajectory_tokens} is above "
            f"sidecar.max_model_tokens={sidecar.max_model_tokens}: the embedded engine could not hold "
            "the longest trajectory; raise sidecar.max_model_tokens or lower the limit",
        )


def _row_lengths(config: Config) -> Iterator[Problem]:
    rows, longest = config.batch.row_lengths, config.limits.max_trajectory_tokens
    if not rows or rows[0] < 1 or any(b <= a for a, b in zip(rows, rows[1:], strict=False)):
        yield (
            ("batch.row_lengths",),
            f"batch.row_lengths={rows} must be positive and strictly increasing; "
            f"write for example ({max(longest // 2, 1)}, {longest})",
        )
    elif rows[-1] < longest:
        yield (
            ("batch.row_lengths", "limits.max_trajectory_tokens"),
            f"batch.row_lengths={rows} cannot hold a trajectory of "
            f"limits.max_trajectory_tokens={longest}; add {longest} to batch.row_lengths or lower the limit",
        )
    if config.batch.mixed_lengths and len(rows) > 4:
        yield (
            ("batch.mixed_lengths", "batch.row_lengths"),
            f"batch.mixed_lengths compiles the update for each of the {len(rows)} batch.row_lengths; keep at most 4",
        )


def _mesh(config: Config) -> Iterator[Problem]:
    sizes = config.mesh.sizes
    for name, size in sizes.items():
        if size == 0:
            yield (
                (f"mesh.{name}",),
                f"mesh.{name}=0 leaves no device; set it to 1 to split nothing, or to -1 for all devices that the "
                "other axes leave",
            )
    open_ones = [f"mesh.{name}" for name, size in sizes.items() if size == -1]
    if len(open_ones) > 1:
        yield (
            tuple(open_ones),
            f"{' and '.join(open_ones)} are all -1, but only one axis can take the devices that are left; "
            "give numbers to the others",
        )
    rows, ways = config.batch.rows_per_microbatch, max(sizes["data"], 1) * max(sizes["fsdp"], 1)
    if rows % ways:
        yield (
            ("batch.rows_per_microbatch", "mesh.data", "mesh.fsdp"),
            f"batch.rows_per_microbatch={rows} does not divide over mesh.data={sizes['data']} x "
            f"mesh.fsdp={sizes['fsdp']}; set it to a multiple of {ways}",
        )
    odd = [n for n in config.batch.row_lengths if n % max(sizes["context"], 1)]
    if odd:
        yield (
            ("batch.row_lengths", "mesh.context"),
            f"batch.row_lengths has {odd[0]}, which does not divide over mesh.context={sizes['context']}; "
            "make every row length a multiple of it",
        )
