"""The sidecar with two more routes: SGLang's own update of its weights from a folder, to compare with, and its memory.

python benchmarks/support/sidecar_from_disk.py --engine sglang --model DIR ...
POST /benchmark/from_disk?folder=DIR    answers the seconds that it took
GET /benchmark/memory                   answers the bytes of the GPU that tensors of the sidecar itself take
"""

import asyncio
import os
import sys
import time

from aiohttp import web

from rollout_sidecar import __main__ as program
from rollout_sidecar.engines.sglang import IO, SglangEngine
from rollout_sidecar.engines.sglang_setup import sglang_module
from rollout_sidecar.server import SIDECAR, create_app
from rollout_sidecar.sidecar import Sidecar


def create_app_with_disk(sidecar: Sidecar) -> web.Application:
    """The sidecar's application and the routes."""
    app = create_app(sidecar)
    app.router.add_post("/benchmark/from_disk", _from_disk)
    app.router.add_get("/benchmark/memory", _memory)
    return app


async def _from_disk(request: web.Request) -> web.Response:
    engine = request.app[SIDECAR].agent.engine
    assert isinstance(engine, SglangEngine), "only SGLang loads folders"
    # As in a push: nothing runs, and the cache is flushed when that is so. SGLang's own flush would end the process.
    engine._open.clear()
    try:
        await engine._empty()
        await asyncio.sleep(0.5)  # an engine at rest, in its favour
        begun = time.monotonic()
        update = sglang_module(IO).UpdateWeightFromDiskReqInput(
            model_path=request.query["folder"], flush_cache=False
        )
        success, message, *_ = await engine._manager.update_weights_from_disk(update, None)
        await engine._forget_prefixes()
        seconds = time.monotonic() - begun
    finally:
        engine._open.set()
    return web.json_response({"seconds": seconds, "success": success, "message": message})


async def _memory(request: web.Request) -> web.Response:
    import torch

    used = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return web.Response(text=str(used))


if __name__ == "__main__":
    program.create_app = create_app_with_disk
    code = program.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
