"""The command line of the sidecar."""

import argparse
import json
from typing import Any, get_args

from rollout_sidecar.conversation import ContextPolicy
from rollout_sidecar.formats import format_names
from rollout_sidecar.profiles import PROFILES


def parser() -> argparse.ArgumentParser:
    """Every flag, in groups."""
    out = argparse.ArgumentParser(
        prog="python -m rollout_sidecar",
        description="Serves rollouts with tools over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _server(out.add_argument_group("server"))
    _engine(out.add_argument_group("engine"))
    _conversation(out.add_argument_group("conversation and tools"))
    _reward(out.add_argument_group("reward"))
    return out


def _server(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="other than loopback needs --token_file")
    add("--port", type=_port, default=8000, help="0 takes a free one")
    add("--port_file", default="", help="file to write the port to, once it is listened on")
    add("--token_file", default="", help="file that holds the bearer token")
    add("--tls_cert", default="", help="certificate file (PEM): serve https")
    add("--tls_key", default="", help="its private key (PEM)")
    add(
        "--max_concurrent",
        type=_positive,
        default=256,
        help="trajectories under way, tools included",
    )
    add("--max_body_bytes", type=_positive, default=2**28, help="largest request body")
    add("--max_weights_bytes", type=_positive, default=2**36, help="largest push")
    add("--exit_with_parent", action="store_true", help="end when the parent process ends (Linux)")


def _engine(group: Any) -> None:
    add = group.add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--engine", choices=["jax", "sglang", "scripted"], default="jax", help="what generates")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the weights")
    add("--slots", type=_positive, default=64, help="trajectories that generate at once")
    add("--max_model_tokens", type=_positive, default=4096, help="longest context of the engine")
    add("--script", default="", help="scripted: JSON file with a list of texts, one a turn")
    add("--tp", type=_positive, default=1, help="sglang: GPUs that share one copy of the model")
    add("--dp", type=_positive, default=1, help="sglang: copies of the model, each on --tp GPUs")
    add(
        "--memory_fraction",
        type=_fraction,
        default=0.85,
        help="sglang: share of the GPU for weights and KV cache; less where a trainer shares it",
    )
    add("--deterministic", action="store_true", help="sglang: seeds decide, at some cost in speed")
    add("--float32_head", action="store_true", help="sglang: the LM head's product in float32")
    add(
        "--memory_saver",
        action="store_true",
        help="sglang: memory can be released while a trainer uses the GPU",
    )
    add(
        "--sglang_args",
        type=_json_object,
        default="{}",
        help="sglang: JSON of more arguments for sglang.Engine",
    )
    add("--any_sglang_version", action="store_true", help="sglang: also an untried release")


def _conversation(group: Any) -> None:
    add = group.add_argument
    add("--tool_config", action="append", default=[], help="verl tool_config YAML; repeatable")
    add("--interaction_config", default="", help="verl interaction YAML")
    add(
        "--tool_format",
        default="auto",
        help=f"how the policy writes tool calls: auto (read from the chat template), {', '.join(format_names())}",
    )
    add(
        "--context_policy",
        choices=get_args(ContextPolicy),
        default="keep",
        help="where the chat template would rewrite earlier turns: keep them as sampled, fork a new token stream, or "
        "reject the trajectory",
    )
    add(
        "--profile",
        choices=list(PROFILES),
        default="default",
        help="semantics of verl files: A to 0.6, B 0.5 to 0.7, C from 0.8, or our own",
    )
    add(
        "--truncate_side",
        choices=["middle", "left", "right"],
        default="middle",
        help="what a tool result that is too long loses",
    )
    add(
        "--max_tool_response_length",
        type=_not_negative,
        default=0,
        help="verl's limit of a tool result in characters, 0 for none; tokens are limited by the request",
    )


def _reward(group: Any) -> None:
    add = group.add_argument
    add("--reward", default="", help="built-in name or file.py:function; empty: by data_source")
    add("--reward_kwargs", type=_json_object, default="{}", help="JSON: more arguments for it")
    add(
        "--reward_text",
        choices=["policy", "all"],
        default=None,
        help="what it reads: what the policy wrote, or tool results too, as in verl; default: the profile's",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return number


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 1")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 65535")
    return number
