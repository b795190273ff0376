"""What a run began with, kept in its checkpoints: its settings, and which model.path held.

Another model under the same shapes would fit the checkpoint, and be another reference policy, another tokenizer and
another chat template: that is refused. Settings may change; where a checkpoint does not fit, they are the explanation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from tooljax.config import Config, to_gin

_BLOCK_BYTES = 2**16
_BLOCKS = 64
"""Of a large file this many are read, spread evenly from its first to its last byte."""


class Origin:
    """The settings and the model of a run; its state is a part of each checkpoint."""

    def __init__(self, config: Config):
        """Reads a sample of model.path."""
        self._settings = to_gin(config)
        self._folder = config.model.path
        self._files = fingerprints(self._folder)

    def state(self) -> dict[str, Any]:
        """As JSON values: the config as config.gin has it, and a digest of each of the model's files."""
        return {"config": self._settings, "model": self._files}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Looks whether a run that was saved can go on. ValueError if model.path holds another model now."""
        then, now = state["model"], self._files
        changes = [
            f"{name} {'is new' if name not in then else 'is gone' if name not in now else 'has other contents'}"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]
        if changes:
            raise ValueError(
                f"model.path={self._folder!r} is not the model that the run began with: {', '.join(changes)}. "
                "Tokenizer, template and reference policy come from there: put it back, or start a new run in another "
                "run.dir"
            )
        self._check_adapters(state)

    def _check_adapters(self, state: Mapping[str, Any]) -> None:
        """ValueError if adapters that were saved would be multiplied by another number now."""
        then, now = _values(state["config"]), _values(self._settings)
        for name in ("lora.rank", "lora.alpha", "lora.rank_stabilized"):
            if now["lora.rank"] != "0" and then.get(name, now[name]) != now[name]:
                raise ValueError(
                    f"{name}={now[name]}, but the run began with {then[name]}: its adapters would be other weights at "
                    "once. Put it back, or export the adapter and start a new run in another run.dir"
                )

    def changes(self, state: Mapping[str, Any]) -> list[str]:
        """Settings that were others when that was saved, as "section.field: old -> new"; but for those that only one of
        the two releases has."""
        then, now = _values(state["config"]), _values(self._settings)
        return [
            f"{name}: {then[name]} -> {value}"
            for name, value in now.items()
            if name in then and then[name] != value
        ]


def fingerprints(folder: str | Path) -> dict[str, str]:
    """xxh3-128 of the files in a folder by name: of configs, tokenizer, template and weights. Of those larger than
    4 MiB it is over their size and 64 blocks."""
    suffixes = {".json", ".jinja", ".safetensors"}
    files = sorted(file for file in Path(folder).iterdir() if file.suffix in suffixes)
    return {file.name: _fingerprint(file) for file in files}


def _fingerprint(path: Path) -> str:
    digest = xxhash.xxh3_128()
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
            return digest.hexdigest()
        digest.update(str(size).encode())
        for i in range(_BLOCKS):
            file.seek(i * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _values(gin: str) -> dict[str, str]:
    """The value of each field, as text, in what `to_gin` wrote."""
    bindings = (line.partition(" = ") for line in gin.splitlines())
    return {name: value for name, is_binding, value in bindings if is_binding}
