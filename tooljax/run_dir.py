"""The folder of a run: made once, and what changed in the config since it was last used is told."""

from dataclasses import fields
from pathlib import Path

from tooljax.config import Config, ConfigError, load_config, to_gin
from tooljax.config.gin import SECTIONS, section_of


def make_run_dir(config: Config) -> Path:
    """Makes run.dir. ValueError if it cannot be a folder."""
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"run.dir={config.run.dir!r} cannot be made, {error.filename} is a file; name another folder"
        ) from error
    return folder


def write_config(config: Config) -> list[str]:
    """Writes config.gin into run.dir; returns what it had otherwise, as "section.field: old -> new"."""
    file = Path(config.run.dir) / "config.gin"
    changes: list[str] = []
    if file.is_file():
        try:
            changes = differences(load_config([str(file)]), config)
        except (ConfigError, OSError):  # of another release: there is nothing to compare with
            changes = []
    file.write_text(to_gin(config))
    return changes


def differences(old: Config, new: Config) -> list[str]:
    """Settings that differ, in the order of the config."""
    changes = []
    for section in SECTIONS:
        before, after = section_of(old, section), section_of(new, section)
        for field in fields(before):
            was, now = getattr(before, field.name), getattr(after, field.name)
            if was != now:
                changes.append(f"{section}.{field.name}: {was!r} -> {now!r}")
    return changes
