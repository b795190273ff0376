"""The process a worker's calls are forked from: an interpreter that has everything loaded and has seen no call's data.

It runs one supervisor after the other. Each takes the next request from the socket itself.
"""

import gc
import importlib
import os
import sys
import traceback

from rollout_sidecar.tools.python_sandbox.inside.channel import Channel
from rollout_sidecar.tools.python_sandbox.inside.supervisor import CLOSED, END, supervise

PRELOAD = "cannot preload"
"""How the last words begin where a module of the options cannot be imported."""


def main() -> None:
    """Standard input is the socket. The first frame is the configuration."""
    channel = Channel(0)
    config = channel.receive()
    if config is None:
        return
    for name in config["preload"]:
        try:
            importlib.import_module(name)
        except BaseException as error:
            sys.exit(f"{PRELOAD} {name}: {type(error).__name__}: {error}")
    _close_what_came_along()
    gc.collect()
    gc.freeze()
    first = True
    while True:
        supervisor = os.fork()
        if supervisor == 0:
            _supervise(channel, config, first)
        first = False
        _, status = os.waitpid(supervisor, 0)
        if os.waitstatus_to_exitcode(status) != END:
            return


def _supervise(channel: Channel, config: dict, first: bool) -> None:
    code = CLOSED
    try:
        code = supervise(channel, config, announce=first)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_what_came_along() -> None:
    """The bundle, and whatever bubblewrap had open: from here on only 0, 1 and 2 are."""
    os.closerange(3, 1 + max(int(name) for name in os.listdir("/proc/self/fd")))
