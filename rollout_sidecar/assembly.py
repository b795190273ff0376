"""From the command line's values to a sidecar: every part made, every contradiction told before anything starts."""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path

from rollout_sidecar.agent import Agent
from rollout_sidecar.certification import certify, check_certificate
from rollout_sidecar.engines.base import Engine
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import ToolFormat, explain_choice, get_format
from rollout_sidecar.interactions.registry import load_interactions
from rollout_sidecar.profiles import get_profile
from rollout_sidecar.rewards.registry import check_reward
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.sidecar import ServerOptions, Sidecar, check_exposure
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.registry import open_tools
from rollout_sidecar.truncation import Truncation

_log = logging.getLogger(__name__)


async def make_sidecar(args: argparse.Namespace) -> Sidecar:
    """Makes the sidecar that the flags of `rollout_sidecar.arguments` describe. ValueError names what does not fit."""
    token = _token(args.token_file)
    check_exposure(args.host, token)
    check_reward(args.reward, args.reward_kwargs)
    profile = get_profile(args.profile)
    tokenizer = ChatTokenizer.from_folder(args.model)
    tool_format = _format(args, tokenizer)
    _certify(args, tokenizer, tool_format)
    agent = Agent(
        engine=_engine(args, tokenizer),
        tokenizer=tokenizer,
        tool_format=tool_format,
        tools=await open_tools(args.tool_config, profile=profile),
        interactions=load_interactions(args.interaction_config) if args.interaction_config else {},
        scorer=Scorer(
            reward=args.reward,
            reward_kwargs=args.reward_kwargs,
            text=args.reward_text or profile.solution_text,
        ),
        profile=profile,
        context_policy=args.context_policy,
        truncation=Truncation(
            side=args.truncate_side, max_characters=args.max_tool_response_length
        ),
    )
    options = ServerOptions(
        model=args.model,
        token=token,
        max_concurrent=args.max_concurrent,
        max_body_bytes=args.max_body_bytes,
        max_weights_bytes=args.max_weights_bytes,
    )
    return Sidecar(agent, options)


def _token(file: str) -> str:
    token = Path(file).read_text().strip() if file else ""
    if file and not token:
        raise ValueError(f"--token_file {file} is empty")
    return token


def _format(args: argparse.Namespace, tokenizer: ChatTokenizer) -> ToolFormat:
    if args.tool_format != "auto":
        return get_format(args.tool_format)
    choice = explain_choice(tokenizer)
    _log.info("tool calls are read as %s: %s", choice.format.name, choice.reason)
    return choice.format


def _certify(args: argparse.Namespace, tokenizer: ChatTokenizer, tool_format: ToolFormat) -> None:
    certificate = certify(tokenizer, tool_format)
    _log.info("%s", certificate)
    check_certificate(certificate, args.context_policy)


def _engine(args: argparse.Namespace, tokenizer: ChatTokenizer) -> Engine:
    if args.engine == "scripted":
        script = _script(Path(args.script)) if args.script else []
        if not isinstance(script, list) or not all(isinstance(text, str) for text in script):
            raise ValueError(f"--script {args.script} must be a JSON list of texts, one a turn")
        return ScriptedEngine(tokenizer, script, max_model_tokens=args.max_model_tokens)
    if args.engine == "sglang":
        return _sglang(args)
    from rollout_sidecar.engines.jax import JaxEngine  # the only import of JAX in the sidecar

    return JaxEngine(
        args.model, slots=args.slots, max_model_tokens=args.max_model_tokens, dtype=args.dtype
    )


def _sglang(args: argparse.Namespace) -> Engine:
    from rollout_sidecar.engines.replicated import ReplicatedEngine
    from rollout_sidecar.engines.sglang import SglangEngine
    from rollout_sidecar.engines.sglang_setup import SglangOptions, check_version

    check_version(any_version=args.any_sglang_version)
    options = SglangOptions(
        dtype=args.dtype,
        tensor_parallel=args.tp,
        max_running=-(-args.slots // args.dp),
        memory_fraction=args.memory_fraction,
        deterministic=args.deterministic,
        float32_head=args.float32_head,
        memory_saver=args.memory_saver,
        extra=args.sglang_args,
        any_version=args.any_sglang_version,
    )

    def engine(replica: int) -> SglangEngine:
        mine = options
        if args.dp > 1:
            labels = {"extra_metric_labels": {"replica": str(replica)}} | args.sglang_args
            mine = replace(options, first_gpu=replica * args.tp, extra=labels)
        return SglangEngine(args.model, max_model_tokens=args.max_model_tokens, options=mine)

    return engine(0) if args.dp == 1 else ReplicatedEngine([engine(i) for i in range(args.dp)])


def _script(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--script {file} is not valid JSON: {error}") from None
