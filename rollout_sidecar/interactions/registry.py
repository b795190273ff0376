"""Reads verl's interaction YAML and makes its interactions.

    interaction:
      - name: gsm8k          # optional: the class name without "Interaction", in lower case
        class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
        config: {}

verl's own class names stand for ours, and users' classes may import verl.interactions.base, with or without verl. A key
of `config` that an interaction of ours does not read is an error.
"""

from pathlib import Path
from typing import Any

from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.tools.config_keys import check_keys
from rollout_sidecar.user_files import read_yaml
from rollout_sidecar.verl_names import import_user_object

METHODS = (
    "start_interaction",
    "generate_response",
    "calculate_score",
    "finalize_interaction",
)


def load_interactions(path: str | Path) -> dict[str, BaseInteraction]:
    """The interactions of a file by name, in its order. ValueError names the file and the entry at fault."""
    interactions: dict[str, BaseInteraction] = {}
    for i, entry in enumerate(_read_entries(Path(path))):
        where = f"{path}: interaction[{i}]"
        name, interaction = _make(entry, where)
        if name in interactions:
            raise ValueError(f"{where}: an interaction named {name!r} comes earlier in the file")
        interactions[name] = interaction
    return interactions


def _read_entries(file: Path) -> list[Any]:
    if not file.is_file():
        raise ValueError(f"{file}: no such interaction file")
    content = read_yaml(file)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{file}: expected a list under the key `interaction`")
    return entries


def _make(entry: Any, where: str) -> tuple[str, BaseInteraction]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a mapping with class_name, got {entry!r}")
    # In verl's files an empty key means that it is absent.
    entry = {key: value for key, value in entry.items() if value is not None}
    unknown = sorted(map(str, set(entry) - {"name", "class_name", "config"}))
    if unknown:
        raise ValueError(
            f"{where}: unknown key {unknown[0]!r}; an entry has name, class_name and config"
        )
    class_name = entry.get("class_name")
    if not isinstance(class_name, str):
        raise ValueError(f"{where}: class_name is missing (the import path of a BaseInteraction)")
    config = entry.get("config", {})
    if not isinstance(config, dict):
        raise ValueError(f"{where}: config must be a mapping, got {config!r}")
    if not all(isinstance(key, str) for key in config):
        wrong = next(key for key in config if not isinstance(key, str))
        raise ValueError(f"{where}: the keys of config must be texts, got {wrong!r}")
    name = entry.get("name") or _default_name(class_name)
    if not isinstance(name, str):
        raise ValueError(f"{where}: name must be a text, got {name!r}")
    made = _import_class(class_name, where)
    own = vars(made).get("config_keys")
    if own is not None:
        check_keys(config, own, where, ["stateless"])
    try:
        return name, made({**config, "name": name})
    except (Exception, SystemExit) as error:
        # Foreign code: say whose it was.
        raise ValueError(f"{where}: {class_name} could not be made: {error!r}") from error


def _default_name(class_name: str) -> str:
    simple = class_name.rpartition(".")[2]
    return (simple.removesuffix("Interaction") or simple).lower()


def _import_class(path: str, where: str) -> type[BaseInteraction]:
    found = import_user_object(path, where)
    missing = [method for method in METHODS if not hasattr(found, method)]
    if not isinstance(found, type) or missing:
        raise ValueError(
            f"{where}: {path} is not an interaction: it lacks {', '.join(missing) or 'a class'}"
        )
    return found
