"""Tables of pushes: where their time goes, and which goals they reach."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

FLOOR_RATIO, FULL_RATIO, PAUSE_MS, DISK_RATIO = 1.25, 30.0, 100.0, 5.0
"""Goals: of the entropy floor at most, of all weights in bfloat16 at least, of the pause at most, and of the time of
SGLang's update from a folder at least."""

CODING = ("find", "fetch", "encode", "apply", "copy", "hash")
SIDECAR = ("verify", "stage", "pause")


class Push(NamedTuple):
    """A push, as both ends saw it."""

    report: Any
    """PushReport."""
    swap_s: dict[str, float]
    """Seconds in the sidecar by stage."""


def print_stages(pushes: Sequence[Push]) -> None:
    """Seconds of the full push, of the first delta, which compiles, and the median and the slowest of the others."""
    later = sorted(pushes[2:], key=lambda push: push.report.seconds)
    columns = {"full": pushes[:1], "first delta": pushes[1:2], "delta": later}
    columns["slowest"] = later[-1:]
    columns = {name: some for name, some in columns.items() if some}

    def line(name: str, value: Callable[[Push], float], form: str = "14.3f") -> None:
        values = (statistics.median(map(value, some)) for some in columns.values())
        print(f"{name:38}" + "".join(f"{value:{form}}" for value in values))

    print(f"{'':38}" + "".join(f"{name:>14}" for name in columns))
    line("bytes", lambda push: push.report.bytes, "14,.0f")
    line("times smaller than in full", lambda push: full_ratio(push), "14,.1f")
    line("seconds, all", lambda push: push.report.seconds)
    line("  trainer, before sending", lambda push: push.report.stages["code"])
    for stage in CODING:
        name = f"    {stage}" + ("" if stage in ("find", "fetch") else " (sum over threads)")
        line(name, lambda push, s=stage: push.report.stages.get(s, 0.0))
    line("  sending and all that follows", lambda push: push.report.stages["send"])
    for stage in SIDECAR:
        line(f"    {stage} (sidecar)", lambda push, s=stage: push.swap_s.get(s, 0.0))
        for part in sorted(name for name in pushes[0].swap_s if name.startswith(f"{stage}_")):
            line(f"      {part}", lambda push, s=part: push.swap_s.get(s, 0.0))
    line("    the rest: HTTP", lambda push: http_s(push))
    print()


def http_s(push: Push) -> float:
    """Seconds of sending that no stage of the sidecar explains."""
    return push.report.stages["send"] - sum(push.swap_s.get(stage, 0.0) for stage in SIDECAR)


def full_ratio(push: Push) -> float:
    """How many times fewer bytes than all weights."""
    return push.report.full_bytes / max(push.report.bytes, 1)


def print_goals(pushes: Sequence[Push], disk_s: float | None) -> None:
    """Of the deltas, the first of which compiles and does not count. Medians; of the pause the longest."""
    deltas = [push for push in (pushes[2:] or pushes[1:]) if push.report.changed_elements]
    if not deltas:
        return

    def median(value: Callable[[Push], float]) -> float:
        return statistics.median(map(value, deltas))

    share = median(lambda push: push.report.changed_elements / push.report.elements)
    print(f"goals, at {share:.3%} changed elements, {len(deltas)} deltas")
    print(f"{'':44}{'measured':>12}{'goal':>12}")
    ratio = median(lambda push: push.report.bytes / push.report.floor_bytes)
    goal("bytes of a delta, of the entropy floor", ratio, FLOOR_RATIO, most=True)
    goal("times fewer bytes than all in bfloat16", median(full_ratio), FULL_RATIO, most=False)
    pause_ms = 1e3 * max(push.swap_s.get("pause", 0.0) for push in deltas)
    goal("longest pause of generation, ms", pause_ms, PAUSE_MS, most=True)
    if disk_s is not None:
        ours_s = median(lambda push: push.report.seconds)
        print(f"{'a delta push, s':44}{ours_s:12.3f}{disk_s / DISK_RATIO:11.3f}")
        print(f"{'update_weights_from_disk, s':44}{disk_s:12.3f}")
        goal("times faster than that", disk_s / ours_s, DISK_RATIO, most=False)
    print()


def goal(name: str, value: float, limit: float, *, most: bool) -> None:
    """One line of the goals."""
    sign, reached = ("<=", value <= limit) if most else (">=", value >= limit)
    word = "reached" if reached else "missed"
    print(f"{name:44}{value:12.2f}{f'{sign} {limit:g}':>12}  {word}")
