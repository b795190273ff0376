"""Under what an evaluation is made: whose weights, and what is withheld."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rollout_sidecar.protocol import Limits, Task

Who = Literal["served", "base", "trained"]
"""What the sidecars serve as it is; model.path; the trained weights."""


@dataclass(frozen=True)
class Condition:
    """One column of a comparison."""

    who: Who
    withheld: Literal["", "no_tools", "single_turn"] = ""

    @classmethod
    def parse(cls, text: str, *, who: Who | None = None) -> "Condition":
        """Of a setting such as "trained/no_tools"; `who` takes the place of the policy that it names."""
        policy, _, withheld = text.partition("/")
        return cls(who or policy, withheld)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """As in the setting."""
        return f"{self.who}/{self.withheld}" if self.withheld else self.who

    @property
    def label(self) -> str:
        """For people."""
        return {
            "": self.who,
            "no_tools": f"{self.who}, tools withheld",
            "single_turn": f"{self.who}, single turn",
        }[self.withheld]

    def tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks as this condition puts them: prompts are the same but for the tools that they offer."""
        return [replace_tools(task) for task in tasks] if self.withheld == "no_tools" else [*tasks]

    def limits(self, limits: Limits) -> Limits:
        """In a single turn tools are offered, and a call ends the trajectory: what is known without their results."""
        once = self.withheld == "single_turn"
        return msgspec.structs.replace(limits, max_turns=1) if once else limits


AS_SERVED = Condition("served")


def chosen(settings: Sequence[str], *, model: bool, trained: bool) -> list[Condition]:
    """The conditions of evaluate.conditions that can be measured, one policy after the other.

    Without a model.path what the sidecars serve stands for every policy; without trained weights, the base does.
    Raises ValueError for none.
    """
    if not settings:
        raise ValueError(
            'evaluate.conditions=() compares nothing; write for example ("base", "trained")'
        )
    instead: Who | None = None if model and trained else "base" if model else "served"
    found = dict.fromkeys(Condition.parse(text, who=instead) for text in settings)
    return sorted(found, key=lambda condition: condition.who)  # weights are pushed once each


def replace_tools(task: Task) -> Task:
    """The same task, with every tool withheld."""
    return msgspec.structs.replace(task, tools=[])
