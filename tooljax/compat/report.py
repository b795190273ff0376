"""The report on a user's files: what was read, what each option became, and each difference that matters for them."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_sidecar.profiles import PROFILES, get_profile
from rollout_sidecar.rewards.registry import get_reward
from rollout_sidecar.user_files import find_path
from tooljax.compat.files import KIND_NAMES, Kind, Reading, read_file
from tooljax.compat.options import TURNS, Translation, contradictions, full_name, translate
from tooljax.compat.points import Subject, points_for

RELEASES = {
    "default": "tooljax's own: the safest reading of each point",
    "A": "verl up to 0.6.1",
    "B": "verl 0.5.0 to 0.7.1",
    "C": "verl 0.8.0 and later",
}

_REWARD = "custom_reward_function.path"
_NAMED_FILES: dict[str, Kind] = {
    "data.train_files": "records",
    "data.val_files": "records",
    f"{TURNS}.tool_config_path": "tool_config",
    f"{TURNS}.function_tool_path": "function_tools",
    f"{TURNS}.interaction_config_path": "interaction",
    _REWARD: "reward",
}
"""Options that name other files, and what these are."""
_MODEL = "actor_rollout_ref.model.path"

_WIDTH = 100


@dataclass
class Report:
    """All that was found."""

    profile: str
    readings: list[Reading] = field(default_factory=list)
    translation: Translation = field(default_factory=Translation)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What cannot run, of single files and of files together."""


def make_report(paths: Sequence[str | Path], *, profile: str = "default") -> Report:
    """Reads the files, and those that their options name. ValueError for an unknown profile."""
    get_profile(profile)
    report = Report(profile, [read_file(Path(path), profile=profile) for path in paths])
    options: dict[str, Any] = {}
    # A launch script overrides the YAML file that it names.
    for reading in sorted(report.readings, key=lambda reading: reading.path.suffix == ".sh"):
        options |= {
            name: _found(name, value, reading.path.parent)
            for name, value in reading.options.items()
        }
    report.translation = translate(options, profile)
    readings = {reading.path.resolve(): reading for reading in report.readings}
    for path, kind in _named_files(report.translation.values):
        known = readings.get(path.resolve())
        # A reward is read again, since the options may name another of the file's functions.
        if known is None or kind == "reward":
            function = report.translation.values.get("custom_reward_function.name", "compute_score")
            readings[path.resolve()] = read_file(
                known.path if known else path, profile=profile, kind=kind, function=str(function)
            )
    report.readings = list(readings.values())
    report.problems = [problem for reading in report.readings for problem in reading.problems]
    report.problems += [f"{name}: {why}" for name, why in report.translation.problems.items()]
    report.problems += contradictions(report.translation)
    _compare(report)
    return report


def _found(name: str, value: Any, folder: Path) -> Any:
    """The value of an option; of one that names files, where they are: beside the file that names them, first."""
    if isinstance(value, list):
        return [_found(name, part, folder) for part in value]
    if full_name(name) not in {*_NAMED_FILES, _MODEL} or not isinstance(value, str) or not value:
        return value
    return str(find_path(value, folder) or value)


def _named_files(values: dict[str, Any]) -> Iterator[tuple[Path, Kind]]:
    for name, kind in _NAMED_FILES.items():
        value = values.get(name)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and path and "$" not in path:
                yield Path(path), kind


def _compare(report: Report) -> None:
    """What records need, against what the other files bring."""
    kinds = {reading.kind for reading in report.readings}
    tools = set().union(*(reading.tools for reading in report.readings))
    interactions = set().union(*(reading.interactions for reading in report.readings))
    every_tool = not any(r.kind == "tool_config" and "mcp" in r.subjects for r in report.readings)
    brings_tools = every_tool and bool({"tool_config", "function_tools", "options"} & kinds)
    for reading in report.readings:
        if reading.kind != "records" or not reading.needs:
            continue
        by_row = get_profile(report.profile).offered_tools == "row"
        for what, cannot_run in (("tools", by_row), ("offered tools", True)):
            missing = sorted(reading.needs[what] - tools)
            if missing and brings_tools:
                told = report.problems if cannot_run else report.warnings
                told.append(
                    f"{reading.path}: rows name the tools {', '.join(missing)}, which no file here brings"
                )
        missing = sorted(reading.needs["interactions"] - interactions)
        if missing:
            # Records alone are not a whole run.
            told = report.problems if {"interaction", "options"} & kinds else report.warnings
            told.append(
                f"{reading.path}: rows name the interactions {', '.join(missing)}, which no file here brings"
            )
        if "reward" not in kinds:
            report.problems += _without_reward(reading)


def _without_reward(reading: Reading) -> Iterator[str]:
    for data_source in sorted(reading.needs["data_sources"]):
        try:
            get_reward("", data_source)
        except ValueError as error:
            yield f"{reading.path}: {error}; with a file: reward.function = 'path/to/file.py:compute_score'"


# --- as text ----------------------------------------------------------------------------------------------------


def to_text(report: Report) -> str:
    """The report for a terminal."""
    subjects: set[Subject] = set()
    for reading in report.readings:
        subjects |= reading.subjects
    parts = [
        [f"profile {report.profile}: {RELEASES[report.profile]}"],
        ["files", *_files(report)],
        _options(report.translation) if report.translation.values else [],
        ["differences", *_differences(subjects, report.profile)],
        ["warnings", *(_item(text) for text in report.warnings)] if report.warnings else [],
        _verdict(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _item(text: str, indent: str = "  ") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _files(report: Report) -> Iterator[str]:
    for reading in report.readings:
        kind = KIND_NAMES[reading.kind] if reading.kind else "unknown"
        yield _item(f"{'CANNOT RUN' if reading.problems else 'ok'}  {reading.path} ({kind})")
        yield from (_item(fact, "      ") for fact in reading.facts)


def _options(translation: Translation) -> list[str]:
    lines = ["options"]
    for setting, value in translation.settings.items():
        lines.append(_item(f"{setting} = {value!r}  <- {translation.origins[setting]}"))
    for name, why in translation.notes.items():
        lines.append(_item(f"(no setting)  <- {name}: {why}"))
    if translation.unused:
        lines.append(_item(f"not used here: {', '.join(sorted(translation.unused))}"))
    return lines


def _differences(subjects: set[Subject], profile: str) -> Iterator[str]:
    theirs = "verl" if profile == "default" else f"verl {profile}"
    chosen = PROFILES[get_profile(profile).name]
    for point in points_for(subjects):
        verl, ours = point.of(profile), point.ours(chosen)
        yield f"  {point.name}"
        yield _item(f"{theirs + ':':9}{verl}", "      ")
        yield _item(f"{'tooljax:':9}{'the same' if ours == verl else ours}", "      ")
        yield _item(f"{'change:':9}{point.change}", "      ")


def _verdict(report: Report) -> list[str]:
    if not report.problems:
        return ["everything here can run"]
    return ["cannot run", *(_item(problem) for problem in report.problems)]


# --- as a config --------------------------------------------------------------------------------------------------


def to_gin(report: Report) -> str:
    """The options as a .gin file, with a comment for everything that is not in it."""
    translation = report.translation
    lines = [f"# from {', '.join(str(r.path) for r in report.readings if r.kind == 'options')}"]
    for setting, value in sorted(translation.settings.items()):
        lines.append(f"{setting} = {value!r}  # {translation.origins[setting]}")
    for title, found in (
        ("cannot run here", translation.problems),
        ("no setting", translation.notes),
    ):
        lines += [f"# {title}: {name}: {why}" for name, why in found.items()]
    lines += [f"# not used here: {name}" for name in sorted(translation.unused)]
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"
