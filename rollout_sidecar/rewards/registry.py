"""Finds a reward function by name, by a task's data_source, or in a file."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollout_sidecar.rewards import code, gsm8k, guess_number, math_answer, search_qa
from rollout_sidecar.rewards.base import RewardFunction
from rollout_sidecar.verl_names import load_user_file

_BY_NAME: dict[str, RewardFunction] = {
    "gsm8k": gsm8k.compute_score,
    "guess_number": guess_number.compute_score,
    "math": math_answer.compute_score,
    "math_dapo": math_answer.compute_dapo_score,
    "search_qa": search_qa.compute_score,
    "code": code.compute_score,
}
# data_source, or its beginning where a * follows, to a name above. verl's, where verl has them.
_BY_DATA_SOURCE: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "tooljax/arithmetic": "gsm8k",
    "tooljax/guess_number": "guess_number",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "numina_*": "math",
    "math": "math_dapo",
    "math_dapo*": "math_dapo",
    "aime*": "math_dapo",
    "searchR1_*": "search_qa",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
}


def register(name: str, function: RewardFunction, *, data_sources: Iterable[str] = ()) -> None:
    """Makes a function known by name, and for these data_sources; one that ends in * stands for all that begin so."""
    _BY_NAME[name] = function
    _BY_DATA_SOURCE.update(dict.fromkeys(data_sources, name))


def get_reward(name_or_path: str, data_source: str = "") -> RewardFunction:
    """The function to score a task with.

    Args:
        name_or_path: a built-in name, or path/to/file.py:function (path/to/file.py: its compute_score). "" chooses by
            data_source.
        data_source: the task's; read only when name_or_path is "".
    """
    if name_or_path == "":
        name = _name_for(data_source)
        if name is None:
            raise ValueError(
                f"no built-in reward for data_source {data_source!r} (there are rewards for: "
                f"{', '.join(sorted(_BY_DATA_SOURCE))}); name a reward, or give path/to/file.py:function"
            )
        return _BY_NAME[name]
    if name_or_path in _BY_NAME:
        return _BY_NAME[name_or_path]
    path, _, function = name_or_path.rpartition(":")
    if name_or_path.endswith(".py"):
        path, function = name_or_path, "compute_score"
    if not path.endswith(".py"):
        raise ValueError(
            f"unknown reward {name_or_path!r}; there are: {', '.join(sorted(_BY_NAME))}, or give "
            "path/to/file.py:function"
        )
    return _load(Path(path), function)


def _name_for(data_source: str) -> str | None:
    """The exact entry, else the longest beginning."""
    if data_source in _BY_DATA_SOURCE:
        return _BY_DATA_SOURCE[data_source]
    beginnings = [
        key for key in _BY_DATA_SOURCE if key.endswith("*") and data_source.startswith(key[:-1])
    ]
    return _BY_DATA_SOURCE[max(beginnings, key=len)] if beginnings else None


def check_reward(name_or_path: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, at the start rather than in each rollout, for a reward that cannot be found or arguments that
    nobody takes."""
    if name_or_path:
        functions = {name_or_path: get_reward(name_or_path)}
    else:
        functions = _BY_NAME
    taken = {name: _parameters(function) for name, function in functions.items()}
    if any(parameters is None for parameters in taken.values()):
        return
    known = sorted({key for parameters in taken.values() for key in parameters or ()})
    for key in kwargs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            whose = (
                f"the reward {name_or_path!r} takes" if name_or_path else "built-in rewards take"
            )
            raise ValueError(
                f"reward argument {key!r} is not known; {whose}: {', '.join(known) or 'none'}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )


def accepted_kwargs(
    name_or_path: str, function: RewardFunction, kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What a function is given of `kwargs`: all if it was named, what it takes if it was chosen by data_source."""
    if name_or_path or not kwargs:
        return kwargs
    parameters = _parameters(function)
    if parameters is None:
        return kwargs
    return {key: value for key, value in kwargs.items() if key in parameters}


def _parameters(function: RewardFunction) -> Iterable[str] | None:
    """Names of the arguments beside verl's four; None if any will do, or if it cannot be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    verls = ("data_source", "solution_str", "ground_truth", "extra_info")
    return [parameter.name for parameter in parameters if parameter.name not in verls]


def _load(file: Path, function: str) -> RewardFunction:
    module = load_user_file(file, "reward")
    found = getattr(module, function, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(
            f"{file} has no function {function!r}; it has: {', '.join(names) or 'none'}"
        )
    return found
