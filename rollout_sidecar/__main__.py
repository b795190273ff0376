"""Starts a sidecar: `python -m rollout_sidecar --engine jax --model <folder> --tool_config tools.yaml`.

Listens first, then loads the model: /healthz answers at once, /readyz when the first rollout can start. SIGTERM and
Ctrl-C abort what runs, release its tools and end with exit code 0.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from rollout_sidecar.arguments import parser
from rollout_sidecar.assembly import make_sidecar
from rollout_sidecar.foreign_threads import LoopExecutor
from rollout_sidecar.garbage import set_aside_what_is_there
from rollout_sidecar.server import create_app

_log = logging.getLogger("rollout_sidecar")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    args = parser().parse_args(argv)
    if args.exit_with_parent:
        _exit_with_parent()
    loop = asyncio.new_event_loop()
    loop.set_default_executor(LoopExecutor())
    try:
        loop.run_until_complete(_serve(args))
    except (ValueError, OSError) as error:
        print(f"rollout_sidecar: {error}", file=sys.stderr)
        return 1
    finally:
        loop.close()
    return 0


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    tls = _tls(args)
    sidecar = await make_sidecar(args)
    runner = web.AppRunner(create_app(sidecar), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, args.host, args.port, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        if args.port_file:
            _write_atomically(Path(args.port_file), str(port))
        scheme = "https" if tls else "http"
        _log.info("listening on %s://%s:%d, loading %s", scheme, args.host, port, args.model)
        starting = asyncio.create_task(sidecar.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            starting.result()  # raises what the engine raised
            set_aside_what_is_there()
            _stop_on_signals(stop)  # again: SGLang takes them over when it starts
            _log.info("ready")
            await stop.wait()
        _log.info("stopping")
        starting.cancel()
        stopping.cancel()
        await sidecar.stop()
    finally:
        await runner.cleanup()


def _stop_on_signals(stop: asyncio.Event) -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ValueError("--tls_cert and --tls_key come together: give both files, or neither")
    if not args.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(args.tls_cert, args.tls_key)
    except OSError as error:  # ssl.SSLError too
        raise ValueError(
            f"--tls_cert {args.tls_cert} with --tls_key {args.tls_key} cannot be used: {error}"
        ) from error
    return context


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
    # Not sys.exit: that waits for threads of libraries, and one of them may hang for ever.
    os._exit(code)
