"""The points on which verl's releases disagree with each other or with us: what each does, and where to change it.

verl's generations: A is up to 0.6.1 (the SGLang rollout), B is 0.5.0 to 0.7.1, C is 0.8.0 and later (both with
ToolAgentLoop).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollout_sidecar.profiles import Profile

Subject = Literal[
    "tools", "mcp", "interaction", "records", "reward", "options", "sandbox", "search"
]
"""What a user's file may be about."""

PROFILE_FIELD = "sidecar.profile"
"""The setting that chooses the profile."""


@dataclass(frozen=True)
class Point:
    """One difference."""

    name: str
    subjects: frozenset[Subject]
    verl: Mapping[str, str]
    """What the generations do; several letters share a text ("BC")."""
    ours: Callable[[Profile], str]
    change: str

    def of(self, generation: str) -> str:
        """What that generation of verl does; all of them, where none is named."""
        if generation == "default":
            return "; ".join(f"{letters}: {text}" for letters, text in self.verl.items())
        return next(text for letters, text in self.verl.items() if generation in letters)


def _point(
    name: str,
    subjects: str,
    verl: Mapping[str, str],
    ours: str | Callable[[Profile], str],
    change: str,
) -> Point:
    say = ours if callable(ours) else lambda profile: ours
    return Point(name, frozenset(subjects.split()), verl, say, change)  # type: ignore[arg-type]


def _by(field: str, **texts: str) -> Callable[[Profile], str]:
    """The text for the value that the profile has in a field."""
    return lambda profile: texts[str(getattr(profile, field))]


_PROFILE = f"{PROFILE_FIELD}, another profile"

POINTS: tuple[Point, ...] = (
    _point(
        "lifetime of a tool's instance",
        "tools",
        {"A": "one a trajectory", "BC": "create, execute, release for each call: state is lost between calls"},
        _by(
            "tool_lifetime",
            trajectory="one a trajectory; release always runs, also when it is aborted",
            call="one a call, as there; release always runs, also when it is aborted",
        ),
        _PROFILE,
    ),
    _point(
        "calc_reward, and the kwargs beside create_kwargs",
        "tools records",
        {
            "A": "calc_reward once a trajectory; all four kwargs are used",
            "BC": "calc_reward is never called; only create_kwargs are used",
        },
        _by(
            "tool_lifetime",
            trajectory="calc_reward once a trajectory; all four kwargs are used",
            call="calc_reward is never called; only create_kwargs are used",
        ),
        _PROFILE,
    ),
    _point(
        "tools offered to the policy",
        "tools records",
        {
            "A": "those named in the row's tools_kwargs",
            "B": "all of the file",
            "C": "all, or extra_info.tool_selection",
        },
        _by(
            "offered_tools",
            row="those named in the row's tools_kwargs, all if it has none; extra_info.tool_selection comes first",
            all="all, or extra_info.tool_selection",
        ),
        "extra_info.tool_selection of a row, or " + _PROFILE,
    ),
    _point(
        "how create gets its kwargs",
        "tools records",
        {"A": "create(instance_id, **create_kwargs)", "BC": "create(create_kwargs={...})"},
        _by(
            "create_kwargs",
            spread="create(instance_id, **create_kwargs)",
            nested="create(create_kwargs={...})",
        ),
        _PROFILE,
    ),
    _point(
        "tool schemas in the prompt",
        "tools",
        {
            "A": "with null fields (enum: null, strict: false); items, nested properties, anyOf, default are dropped",
            "BC": "as set, in the order of its classes; items, nested properties, anyOf, default are dropped",
        },
        _by(
            "schema_fields",
            as_written="as written, nothing dropped",
            set_fields="as set, in verl's order, nothing dropped: the same text for schemas that verl can hold",
            all_fields="with verl's null fields, nothing dropped: the same text for schemas that verl can hold",
        ),
        "the tool_schema of the file, or " + _PROFILE,
    ),
    _point(
        "more calls in a turn than max_parallel_calls",
        "tools options",
        {"A": "no limit", "BC": "dropped without an answer"},
        "each is answered, those beyond the limit with \"not executed\"",
        "limits.max_parallel_calls",
    ),
    _point(
        "a call that cannot be read (bad JSON)",
        "tools",
        {
            "A": "dropped; without another call the trajectory ends",
            "B": "the exception's text is the tool message",
            "C": "\"Invalid JSON in arguments\"; a call that is no JSON at all ends the trajectory",
        },
        "answered with what is wrong, and counted; status invalid_calls after too many turns of it",
        "limits.max_invalid_turns",
    ),
    _point(
        "a tool that raises",
        "tools",
        {"A": "the rollout dies", "BC": "the exception's text is the tool message"},
        "a tool message with the reason, status error, counted",
        "the tool",
    ),
    _point(
        "a tool that hangs",
        "tools",
        {"ABC": "no deadline around execute: the step waits"},
        "the call ends with a message after its deadline; so do the trajectory and the request",
        "limits.tool_timeout_s, config.timeout_s of the entry, limits.trajectory_timeout_s",
    ),
    _point(
        "long tool results",
        "tools options",
        {
            "A": "not cut",
            "B": "max_tool_response_length characters; \"left\" keeps the head",
            "C": "max_tool_response_length characters; \"left\" keeps the tail",
        },
        lambda profile: "cut in tokens as the policy sees them; verl's cut in characters comes first if it is set "
        f"(\"left\" keeps the {profile.left_keeps})",
        "limits.max_tool_result_tokens",
    ),
    _point(
        "a result that fills the token budget exactly",
        "tools",
        {"A": "kept", "BC": "dropped, with the turn's other results"},
        "kept; one that is too long is cut to fit",
        "limits.max_trajectory_tokens",
    ),
    _point(
        "tokens of a turn that called a tool",
        "tools",
        {"A": "written anew from the parsed call", "BC": "as sampled"},
        "as sampled, always; the separator after the end of a turn is inserted with mask 0",
        "nothing",
    ),
    _point(
        "a tool call inside <think>",
        "tools",
        {"ABC": "executed"},
        "not a call: only what follows the thinking is read",
        "nothing",
    ),
    _point(
        "rate limits and workers",
        "sandbox search",
        {"ABC": "one Ray actor for all tools: the first one sets the limit"},
        "each tool has its own; enable_global_rate_limit: false means none",
        "config.rate_limit, config.num_workers",
    ),
    _point(
        "a program that fails",
        "sandbox",
        {"ABC": "\"no stdout here\""},
        "all it wrote, and the reason: exit code, time limit, memory",
        "nothing",
    ),
    _point(
        "sessions with an MCP server",
        "mcp",
        {"AB": "a new one for each call: the server's state is lost", "C": "no MCP tools"},
        _by(
            "tool_lifetime",
            trajectory="one a trajectory, opened again when it is lost",
            call="a new one for each call: the server's state is lost",
        ),
        "config.session: trajectory, run or call",
    ),
    _point(
        "timeout of an MCP call",
        "mcp",
        {"AB": "read and ignored", "C": "no MCP tools"},
        "honoured, and the server is told to stop",
        "config.timeout",
    ),
    _point(
        "several MCP files and servers",
        "mcp",
        {"AB": "only the first file is read; of two tools of one name the last wins", "C": "no MCP tools"},
        "all are read; two tools of one name are an error",
        "config.prefix: true, mcp.tool_selected_list",
    ),
    _point(
        "an MCP server with auth_token",
        "mcp",
        {"AB": "reached by SSE", "C": "no MCP tools"},
        "streamable HTTP is tried first, then SSE",
        "transport: sse in the MCP JSON",
    ),
    _point(
        "the text with which an interaction ends",
        "interaction",
        {"A": "not appended", "B": "appended with mask 0", "C": "no interactions"},
        _by("last_user_message", **{"True": "appended with mask 0", "False": "not appended"}),
        _PROFILE,
    ),
    _point(
        "calculate_score and finalize_interaction",
        "interaction",
        {"AB": "never called", "C": "no interactions"},
        "always called, also when the trajectory is aborted",
        "nothing",
    ),
    _point(
        "a row that names no interaction",
        "interaction records",
        {"A": "\"gsm8k\"", "B": "an error", "C": "no interactions"},
        "\"gsm8k\" if it has other interaction_kwargs, else it is played without one",
        "extra_info.interaction_kwargs.name",
    ),
    _point(
        "rewards of tools and of turns",
        "tools interaction reward",
        {"ABC": "computed and dropped unless compute_score reads them from extra_info"},
        "named terms of the reward, with weights; a weight of 0 is warned about",
        "reward.tool, reward.turn, reward.turn_merge",
    ),
    _point(
        "solution_str of a reward function",
        "reward records",
        {"ABC": "the whole response, tool results included: a tool can earn the reward"},
        _by(
            "solution_text",
            policy="what the policy wrote",
            all="the whole response, tool results included: a tool can earn the reward",
        ),
        "reward.text, or " + _PROFILE,
    ),
    _point(
        "a reward function that fails, or answers with other keys",
        "reward",
        {"ABC": "the step fails, or values are lost; keys are those of the first sample"},
        "that trajectory is unscored and left out, never a 0; keys may differ from row to row",
        "nothing",
    ),
    _point(
        "None in a record",
        "records",
        {"ABC": "a row without tool x reads back as {\"x\": None}, and .get fails"},
        "absent, at every level; the ground truth is kept as it is",
        "nothing",
    ),
    _point(
        "prompts that are too long",
        "records options",
        {"AB": "an error, or cut, by data.truncation", "C": "cut from the left: system prompt and schemas first"},
        "rejected and counted, never cut",
        "limits.max_prompt_tokens",
    ),
    _point(
        "log-probs of the rollout",
        "options",
        {"A": "a second prefill, which ignores the temperature", "BC": "those of sampling, if asked for"},
        "those of sampling, always",
        "nothing",
    ),
)  # fmt: skip


def points_for(subjects: frozenset[Subject] | set[Subject]) -> list[Point]:
    """Those that matter for the files at hand, in the order of the table."""
    return [point for point in POINTS if point.subjects & subjects]
