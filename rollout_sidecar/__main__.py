"""Starts a sidecar: `python -m rollout_sidecar --engine jax --model <folder> --tool_config tools.yaml`.

Listens first, then loads the model: /healthz answers at once, /readyz when the first rollout can start. SIGTERM and
Ctrl-C abort what runs, release its tools and end with exit code 0.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_sidecar.agent import Agent
from rollout_sidecar.engines.base import Engine
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.formats import get_format
from rollout_sidecar.rewards.registry import check_reward
from rollout_sidecar.scoring import Scorer
from rollout_sidecar.server import ServerOptions, Sidecar, check_exposure, create_app
from rollout_sidecar.tokenizer import ChatTokenizer
from rollout_sidecar.tools.registry import load_tools

MAX_THREADS = 256
"""For tools and rewards that are plain functions. One that hangs occupies its thread for ever."""

_log = logging.getLogger("rollout_sidecar")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    args = _parser().parse_args(argv)
    if args.exit_with_parent:
        _exit_with_parent()
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="sidecar"))
    try:
        loop.run_until_complete(_serve(args))
    except (ValueError, OSError) as error:
        print(f"rollout_sidecar: {error}", file=sys.stderr)
        return 1
    finally:
        loop.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout_sidecar",
        description="Serves rollouts with tools over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder")
    add("--engine", choices=["jax", "scripted"], default="jax", help="what generates")
    add("--script", default="", help="scripted engine: JSON file with a list of texts, one a turn")
    add("--host", default="127.0.0.1", help="other than loopback needs --token_file")
    add("--port", type=_port, default=8000, help="0 takes a free one")
    add("--port_file", default="", help="file to write the port to, once it is listened on")
    add("--token_file", default="", help="file that holds the bearer token")
    add("--tool_config", default="", help="verl tool_config YAML")
    add("--tool_format", default="hermes", help="how the policy writes tool calls")
    add("--reward", default="", help="built-in name or file.py:function; empty: by data_source")
    add("--reward_kwargs", type=_json_object, default="{}", help="JSON: more arguments for it")
    add(
        "--reward_text",
        choices=["policy", "all"],
        default="policy",
        help="what it reads: what the policy wrote, or tool results too, as in verl",
    )
    add(
        "--slots", type=_positive, default=64, help="trajectories that the engine generates at once"
    )
    add("--max_model_tokens", type=_positive, default=4096, help="longest context of the engine")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the weights")
    add(
        "--max_concurrent",
        type=_positive,
        default=256,
        help="trajectories under way, tools included",
    )
    add("--max_body_bytes", type=_positive, default=2**28, help="largest request body")
    add("--max_weights_bytes", type=_positive, default=2**36, help="largest push")
    add("--exit_with_parent", action="store_true", help="end when the parent process ends (Linux)")
    return parser


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    sidecar = _make_sidecar(args)
    runner = web.AppRunner(create_app(sidecar), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, args.host, args.port)
        await site.start()
        port = runner.addresses[0][1]
        if args.port_file:
            _write_atomically(Path(args.port_file), str(port))
        _log.info("listening on http://%s:%d, loading %s", args.host, port, args.model)
        starting = asyncio.create_task(sidecar.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            starting.result()  # raises what the engine raised
            _log.info("ready")
            await stop.wait()
        _log.info("stopping")
        starting.cancel()
        stopping.cancel()
        await sidecar.stop()
    finally:
        await runner.cleanup()


def _make_sidecar(args: argparse.Namespace) -> Sidecar:
    token = Path(args.token_file).read_text().strip() if args.token_file else ""
    if args.token_file and not token:
        raise ValueError(f"--token_file {args.token_file} is empty")
    check_exposure(args.host, token)
    check_reward(args.reward, args.reward_kwargs)
    tokenizer = ChatTokenizer.from_folder(args.model)
    agent = Agent(
        engine=_make_engine(args, tokenizer),
        tokenizer=tokenizer,
        tool_format=get_format(args.tool_format),
        tools=load_tools(args.tool_config) if args.tool_config else {},
        scorer=Scorer(reward=args.reward, reward_kwargs=args.reward_kwargs, text=args.reward_text),
    )
    options = ServerOptions(
        model=args.model,
        token=token,
        max_concurrent=args.max_concurrent,
        max_body_bytes=args.max_body_bytes,
        max_weights_bytes=args.max_weights_bytes,
    )
    return Sidecar(agent, options)


def _make_engine(args: argparse.Namespace, tokenizer: ChatTokenizer) -> Engine:
    if args.engine == "scripted":
        script = _read_script(Path(args.script)) if args.script else []
        if not isinstance(script, list) or not all(isinstance(text, str) for text in script):
            raise ValueError(f"--script {args.script} must be a JSON list of texts, one a turn")
        return ScriptedEngine(tokenizer, script, max_model_tokens=args.max_model_tokens)
    from rollout_sidecar.engines.jax import JaxEngine  # the only import of JAX in the sidecar

    return JaxEngine(
        args.model, slots=args.slots, max_model_tokens=args.max_model_tokens, dtype=args.dtype
    )


def _read_script(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--script {file} is not valid JSON: {error}") from None


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


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 65535")
    return number


def _write_atomically(path: Path, text: str) -> None:
    """A reader that waits for the file never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _exit_with_parent() -> None:
    """Asks Linux for SIGTERM when the parent ends, however it ends."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("--exit_with_parent works on Linux only")
    parent = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: that waits for the threads of tools and rewards, and one of them may hang for ever.
    os._exit(code)
