"""Tasks, settings and trajectories in the form in which verl gives them to a user's sampler.

Arrays are torch's where the user's code has imported torch, as verl's would be, and else NumPy's.
"""

import base64
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_sidecar.protocol import Task, Trajectory
from rollout_sidecar.verl_samplers import DataProto
from tooljax.config import Config
from tooljax.curriculum.base import Seen

ARRAY = "__array__"
"""Key of an array in JSON."""


class Rows(Sequence[Any]):
    """The rows, by number, or a column of them by name."""

    def __init__(self, tasks: Sequence[Task]):
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            return [row[which] for row in self]
        return _row(self._tasks[which])

    @property
    def dataframe(self) -> "Rows":
        """verl's name for what its dataset has read."""
        return self


class VerlConfig(dict[str, Any]):
    """Settings by key or attribute, as in omegaconf's DictConfig."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"verl's data section has no {name} here") from None


def data_config(config: Config) -> Any:
    """The data section as verl names it; omegaconf's where that is loaded."""
    data, own = config.data, config.curriculum
    values = {
        "train_files": list(data.train),
        "val_files": list(data.eval),
        "train_batch_size": data.prompts_per_step,
        "train_max_samples": data.max_rows or -1,
        "prompt_key": data.prompt_key,
        "reward_fn_key": data.reward_key,
        "max_prompt_length": config.limits.max_prompt_tokens,
        "max_response_length": config.limits.max_trajectory_tokens
        - config.limits.max_prompt_tokens,
        "shuffle": data.shuffle,
        "seed": config.run.seed,
        "dataloader_num_workers": 0,
    }
    sampler = {"class_path": own.class_path, "class_name": own.class_name}
    if (omegaconf := sys.modules.get("omegaconf")) is not None:
        return omegaconf.OmegaConf.create(values | {"sampler": sampler})
    return VerlConfig(values, sampler=VerlConfig(sampler))


def data_proto(tasks: Sequence[Task], seen: Seen) -> DataProto:
    """A step's trajectories, group after group; a reward lies on the last token of its trajectory, as in verl."""
    places = [(g, s) for g, group in enumerate(seen.groups) for s in range(len(group))]
    trajectories = [seen.groups[g][s] for g, s in places]
    rows = [_row(tasks[seen.tasks[g]]) for g, _ in places]
    width = max(1, *(len(t.token_ids) - t.prompt_tokens for t in trajectories))
    shape = len(trajectories), width
    arrays = {
        "responses": np.zeros(shape, np.int64),
        "response_mask": np.zeros(shape, np.int64),
        "rollout_log_probs": np.zeros(shape, np.float32),
        "token_level_scores": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
    }
    for i, (place, t) in enumerate(zip(places, trajectories, strict=True)):
        length = len(t.token_ids) - t.prompt_tokens
        mask = np.array(t.loss_mask[t.prompt_tokens :], np.int64)
        arrays["responses"][i, :length] = t.token_ids[t.prompt_tokens :]
        arrays["response_mask"][i, :length] = mask
        arrays["rollout_log_probs"][i, :length] = t.rollout_log_probs[t.prompt_tokens :]
        arrays["token_level_scores"][i, max(length - 1, 0)] = t.reward
        arrays["advantages"][i, :length] = seen.advantages[place] * mask
    arrays["token_level_rewards"] = arrays["token_level_scores"].copy()
    arrays["returns"] = arrays["advantages"].copy()
    torch = sys.modules.get("torch")
    batch: dict[str, Any] = (
        {name: torch.from_numpy(array) for name, array in arrays.items()} if torch else {**arrays}
    )
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["uid"] = [f"{seen.step}:{g}" for g, _ in places]
    columns["__num_turns__"] = [len(t.turns) for t in trajectories]
    columns |= _reported(trajectories)
    return DataProto(
        batch,
        {name: _objects(values) for name, values in columns.items()},
        {"global_steps": seen.step + 1},
    )


def to_json(value: Any) -> Any:
    """A state as JSON values; arrays of NumPy and torch, and NumPy's numbers, included."""
    tensor = hasattr(value, "detach")
    if tensor:
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {ARRAY: [str(value.dtype), list(value.shape), text, tensor]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(part) for part in value]
    return value


def from_json(value: Any) -> Any:
    """What `to_json` was given, but that tuples are lists."""
    if isinstance(value, Mapping):
        if ARRAY in value:
            dtype, shape, text, tensor = value[ARRAY]
            array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
            return sys.modules["torch"].from_numpy(array) if tensor else array
        return {key: from_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [from_json(part) for part in value]
    return value


def _row(task: Task) -> dict[str, Any]:
    return {
        "prompt": task.messages,
        "raw_prompt": task.messages,
        "data_source": task.data_source,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": task.extra_info,
        "index": task.extra_info.get("index", 0),
        "tools_kwargs": task.tools_kwargs,
        "interaction_kwargs": task.interaction_kwargs,
    }


def _reported(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """What reward functions reported, where all did."""
    first = set(trajectories[0].metrics)
    names = first.intersection(*(t.metrics for t in trajectories))
    return {name: [t.metrics[name] for t in trajectories] for name in sorted(names)}


def _objects(values: Sequence[Any]) -> np.ndarray:
    """An array of objects, also of lists of equal lengths."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array
