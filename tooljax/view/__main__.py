"""`python -m tooljax.view RUN` serves a page about a run, or a folder of runs, on this machine; Ctrl-C ends it."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from tooljax.view.library import Library
from tooljax.view.server import is_loopback, make_app


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    out = argparse.ArgumentParser(prog="tooljax.view", description=__doc__)
    out.add_argument("run", type=Path, help="folder of a run, or a folder of runs")
    out.add_argument("--port", type=int, default=0, help="default 0: any that is free")
    out.add_argument("--host", default="127.0.0.1", help="a loopback address; default 127.0.0.1")
    return out


async def serve(library: Library, host: str, port: int) -> web.AppRunner:
    """Starts the server; its address is in the runner's `addresses`. ValueError for a host that others can reach."""
    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines, and the page asks for no password; "
            "serve on 127.0.0.1, and reach it by ssh -L 8000:127.0.0.1:PORT"
        )
    runner = web.AppRunner(make_app(library), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ValueError(f"cannot serve on {host}:{port}: {error.strerror or error}") from error
    return runner


async def _run(library: Library, host: str, port: int) -> None:
    runner = await serve(library, host, port)
    try:
        address, bound = runner.addresses[0][:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"tooljax.view: http://{shown}:{bound}/ (Ctrl-C ends it)", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0 when it was ended, 1 if it could not start."""
    args = parser().parse_args(argv)
    try:
        asyncio.run(_run(Library(args.run), args.host, args.port))
    except ValueError as error:
        print(f"tooljax.view: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
