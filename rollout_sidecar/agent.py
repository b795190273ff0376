"""What all rollouts of a sidecar share, and the entry that plays one of them. The loop itself is `rollout.py`."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_sidecar.conversation import Conversation
from rollout_sidecar.engines.base import Engine
from rollout_sidecar.foreign import lost_threads
from rollout_sidecar.formats.base import ToolFormat
from rollout_sidecar.interactions.base import BaseInteraction
from rollout_sidecar.leases import Leases
from rollout_sidecar.metrics import Metrics
from rollout_sidecar.profiles import PROFILES, Profile
from rollout_sidecar.protocol import Message, RolloutRequest, RolloutSpec, Task, Trajectory
from rollout_sidecar.resume import SendProgress
from rollout_sidecar.rollout import Rollout
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.statistics import RecentTrajectories, count
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.base import BaseTool
from rollout_sidecar.tools.gate import GateOptions, ToolGate
from rollout_sidecar.truncation import Truncation

MAX_UNKNOWN_TOOLS = 100
"""Further names are not warned of: they come with requests."""

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Agent:
    """What all rollouts share: the engine, the text side of the model, the tools, and how rewards are made."""

    engine: Engine
    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    tools: Mapping[str, BaseTool] = field(default_factory=dict)
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)
    scorer: Scorer = field(default_factory=Scorer)
    profile: Profile = PROFILES["default"]
    context_policy: Literal["keep", "fork", "reject"] = "keep"
    """What happens where the chat template would write earlier turns differently."""
    truncation: Truncation = field(default_factory=Truncation)
    metrics: Metrics = field(default_factory=Metrics)
    leases: Leases = field(default_factory=Leases)
    """What is open for trajectories: instances of tools, conversations with interactions."""
    gates: dict[str, ToolGate] = field(init=False)
    """By tool: limits, breaker and retries, made from the tool's config."""
    recent: RecentTrajectories = field(default_factory=RecentTrajectories)
    _unknown_tools: set[str] = field(init=False, default_factory=set)
    closing: set[asyncio.Task] = field(default_factory=set)
    """Releases under way. They go on when their rollout is cancelled; wait for them before the loop ends."""

    def __post_init__(self):
        """ValueError if a tool's config has a bad limit."""
        self.gates = {name: _gate(name, tool) for name, tool in self.tools.items()}
        self.metrics.collect(lambda: self.recent.families(self.tools))
        leases = self.leases
        self.metrics.gauge("open_instances", "Instances not released yet.", lambda: leases.live)
        self.metrics.gauge("reaped_instances", "Released by the reaper.", lambda: leases.reaped)
        self.metrics.gauge("leaked_instances", "Never released.", lambda: leases.leaked)
        self.metrics.gauge(
            "lost_threads", "Held up by users' code that did not end in time.", lost_threads
        )

    def converse(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]
    ) -> Conversation:
        """A conversation that begins with these messages, and whose policy may call the tools of these schemas."""
        return Conversation(
            self.tokenizer,
            self.tool_format,
            messages,
            schemas or None,
            context_policy=self.context_policy,
        )

    def warn_of_unknown_tools(self, names: Iterable[str]) -> None:
        """Says once of each tool that tasks bring kwargs for it, and there is none of that name."""
        for name in names:
            if name in self.tools or name in self._unknown_tools:
                continue
            if len(self._unknown_tools) < MAX_UNKNOWN_TOOLS:
                self._unknown_tools.add(name)
                _log.warning(
                    "tasks have tools_kwargs for the tool %r, which this sidecar lacks; it has %s",
                    *(name, list(self.tools)),
                )

    def note(self, trajectory: Trajectory) -> None:
        """Takes a trajectory into the statistics."""
        count(trajectory, self.metrics)
        self.recent.add(trajectory)


async def run_rollout(
    agent: Agent,
    task: Task,
    spec: RolloutSpec,
    request: RolloutRequest,
    ordinal: int = 0,
    on_progress: SendProgress | None = None,
) -> Trajectory:
    """Plays one trajectory to its end. Never raises, except CancelledError; then tools are released all the same.

    Args:
        ordinal: position of the trajectory in its request.
        on_progress: called after every turn from which it could be resumed elsewhere.
    """
    rollout = Rollout(agent, task, spec, request, ordinal, on_progress)
    try:
        try:
            await rollout.play()
            await rollout.score()
        finally:
            await rollout.close()
    except Exception as error:  # a fault of ours: the other trajectories must not pay for it
        _log.exception("rollout %s failed", rollout.trajectory_id)
        rollout.status, rollout.error = "engine_error", f"internal error: {error!r}"
    trajectory = rollout.trajectory()
    agent.note(trajectory)
    return trajectory


def _gate(name: str, tool: BaseTool) -> ToolGate:
    config = getattr(tool, "config", None) or {}
    try:
        idempotent = getattr(tool, "idempotent", False)
        options = GateOptions.of(config, idempotent=idempotent, name=name)
    except ValueError as error:
        raise ValueError(f"tool {name!r}: {error}") from error
    return ToolGate(name, options)
