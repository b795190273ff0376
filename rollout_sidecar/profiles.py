"""Which release of verl a user's files were written for, where releases disagree about what the same file means.

verl's multi-turn semantics changed twice: A is up to 0.6.1 (the SGLang rollout), B is 0.5.0 to 0.7.1 (ToolAgentLoop),
C is 0.8.0 and later. "default" is the safest reading of each point and needs no profile.
"""

from dataclasses import dataclass
from typing import Literal

ProfileName = Literal["default", "A", "B", "C"]


@dataclass(frozen=True)
class Profile:
    """The points on which verl's releases disagree. Faults of all of them (calls dropped without an answer, sampled
    text tokenised again) are in no profile."""

    name: ProfileName
    tool_lifetime: Literal["trajectory", "call"]
    """How long an instance of a tool lives; with "call", create and release surround each execute, and calc_reward is
    not called."""
    offered_tools: Literal["all", "row"]
    """"row": only the tools named in the row's tools_kwargs are offered, where it has any."""
    create_kwargs: Literal["spread", "nested"]
    """create(instance_id, **create_kwargs), or create(create_kwargs=...)."""
    schema_fields: Literal["as_written", "set_fields", "all_fields"]
    """The tool schemas in the prompt: as written; in verl's order of fields; or that with what it fills in (strict:
    false, enum: null). Nothing is left out in any of them but nulls."""
    left_keeps: Literal["head", "tail"]
    """What tool_response_truncate_side "left" keeps."""
    last_user_message: bool
    """The text with which an interaction ends a conversation is appended, with mask 0."""
    tool_rounds_are_user_turns: bool
    """max_user_turns counts tool rounds too."""
    solution_text: Literal["policy", "all"]
    """What reward functions read: what the policy wrote, or also what tools answered (verl's)."""
    seq_mean_token_sum_norm: Literal["length", "scale", "batch_mean_scale"]
    """How the aggregation of that name divides: see tooljax.grpo.aggregation."""


PROFILES: dict[ProfileName, Profile] = {
    "default": Profile(
        name="default",
        tool_lifetime="trajectory",
        offered_tools="all",
        create_kwargs="spread",
        schema_fields="as_written",
        left_keeps="tail",
        last_user_message=False,
        tool_rounds_are_user_turns=False,
        solution_text="policy",
        seq_mean_token_sum_norm="batch_mean_scale",
    ),
    "A": Profile(
        name="A",
        tool_lifetime="trajectory",
        offered_tools="row",
        create_kwargs="spread",
        schema_fields="all_fields",
        left_keeps="tail",
        last_user_message=False,
        tool_rounds_are_user_turns=False,
        solution_text="all",
        seq_mean_token_sum_norm="length",
    ),
    "B": Profile(
        name="B",
        tool_lifetime="call",
        offered_tools="all",
        create_kwargs="nested",
        schema_fields="set_fields",
        left_keeps="head",
        last_user_message=True,
        tool_rounds_are_user_turns=True,
        solution_text="all",
        seq_mean_token_sum_norm="scale",
    ),
    "C": Profile(
        name="C",
        tool_lifetime="call",
        offered_tools="all",
        create_kwargs="nested",
        schema_fields="set_fields",
        left_keeps="tail",
        last_user_message=True,
        tool_rounds_are_user_turns=True,
        solution_text="all",
        seq_mean_token_sum_norm="batch_mean_scale",
    ),
}


def get_profile(name: str) -> Profile:
    """The profile of that name."""
    for profile in PROFILES.values():
        if profile.name == name:
            return profile
    raise ValueError(f"unknown compat profile {name!r}; there are: {', '.join(PROFILES)}")
