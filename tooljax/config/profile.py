"""Which updates are traced for a profiler."""

from collections.abc import Iterator
from dataclasses import dataclass

Problem = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class ProfileConfig:
    """Traces of updates for XProf (TensorBoard's profile page, Perfetto)."""

    steps: tuple[int, ...] = ()
    """Steps whose update is traced into <run.dir>/profile, a few of them after the first, which compiles: (3, 4). A
    traced update is slower. Empty: none."""


def profile_problems(profile: ProfileConfig) -> Iterator[Problem]:
    """What is wrong with these settings."""
    if any(step < 1 for step in profile.steps):
        yield (
            ("profile.steps",),
            f"profile.steps={profile.steps}: steps count from 1; write for example (3, 4)",
        )
