"""Where the time of a traced update went, as tables: by program and stage, by kind of kernel, and the longest ones."""

import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.update_case import category

STAGES = ("embedding", "attention", "feed_forward", "head")
TOP = 30


def attempt(tell: Callable[[], None]) -> None:
    """Tells; what goes wrong with a profile does not cost the measurement."""
    try:
        tell()
    except Exception:
        traceback.print_exc(file=sys.stdout)


def print_jax_trace(folder: Path) -> None:
    """Of the .xplane.pb under a folder, with the stages that XLA's text dumped to `folder` names, if it was."""
    scopes = _scopes(folder)
    tables: list[Any] = [Counter() for _ in range(4)]
    by_module, by_stage, by_kind, by_kernel = tables
    for module, op, kernel, ms in _kernels(folder):
        scope = scopes.get((module, op), "")
        backward = "transpose(jvp" in scope or "rematted" in scope
        stage = next((s for s in STAGES if f"/{s}" in scope or f"({s}" in scope), "other")
        keys = (
            module,
            f"{module}: {stage}{' backward' if backward else ''}",
            f"{module}: {category(kernel + ' ' + op)}",
            f"{module}: {op} {kernel[:60]} | {scope[-90:]}",
        )
        for counted, key in zip(tables, keys, strict=True):
            counted[key] += ms
    total = sum(by_module.values()) or 1.0
    for title, counted in (
        ("programs", by_module),
        ("stages", by_stage),
        ("kinds of kernels", by_kind),
        ("longest kernels", by_kernel),
    ):
        print_table(title, counted, total)


def print_table(title: str, counted: Counter, total: float) -> None:
    """Milliseconds and share of the device's time, the longest first."""
    print(f"\n{title}: {total:.1f} ms on the device")
    for name, ms in counted.most_common(TOP):
        print(f"{ms:9.2f} ms {ms / total:6.1%}  {name}")


def _kernels(folder: Path) -> Iterator[tuple[str, str, str, float]]:
    """Module, operation, kernel and milliseconds of all that ran on the first device."""
    from jax.profiler import ProfileData

    for file in sorted(folder.rglob("*.xplane.pb")):
        planes = list(ProfileData.from_file(str(file)).planes)
        devices = [p for p in planes if p.name.startswith("/device:GPU:0")]
        for plane in devices or [p for p in planes if p.name.startswith("/host:CPU")]:
            for line in plane.lines:
                # Lines such as "XLA Ops" say again what is on the streams.
                if devices and not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    stats = {str(key): value for key, value in event.stats}
                    if devices or "hlo_op" in stats:
                        module = str(stats.get("hlo_module", "none"))
                        op = str(stats.get("hlo_op", ""))
                        yield module, op, event.name, event.duration_ns / 1e6


def _scopes(folder: Path) -> dict[tuple[str, str], str]:
    """By module and operation, the path of named scopes that it came from."""
    found = {}
    line = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*op_name="([^"]*)"')
    for file in folder.rglob("*after_optimizations.txt"):
        module = ""
        for text in file.read_text(errors="replace").splitlines():
            if text.startswith("HloModule "):
                module = text.split()[1].rstrip(",")
            elif match := line.match(text):
                found[module, match[1]] = match[2]
    return found
