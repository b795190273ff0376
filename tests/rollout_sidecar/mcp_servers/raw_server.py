"""An MCP server over stdio without the SDK: it starts in no time, and misbehaves on request.

python raw_server.py [MODE...]
"""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

MODES = set(sys.argv[1:])
HANDSHAKE, MODERN = "2025-06-18", "2026-07-28"
SCHEMA = {
    "type": "object",
    "properties": {
        "ids": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
        "level": {"enum": [1, 2, 3], "default": 2},
        "where": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "point": {"type": ["array", "null"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "note": {"type": "string", "default": None, "description": "löng"},
    },
    "$defs": {"unused": {"type": "number"}},
    "x-extra": {"kept": True},
}
EMPTY = {"type": "object", "properties": {}}

count = 0


def tools() -> list[Any]:
    """What tools/list gives."""
    if "no_tools" in MODES:
        return []
    if "mistyped" in MODES:
        odd = {"type": "object", "properties": {"x": {"type": "strin"}}}
        return [{"name": "inc", "inputSchema": odd}]
    named: list[Any] = [{"name": "inc", "description": "Counts.", "inputSchema": EMPTY}]
    if "pages" in MODES:
        return named + [{"name": f"tool{i}", "inputSchema": EMPTY} for i in range(5)]
    for name in ("pid", "hang", "die", "flood", "bad_result", "refuse", "children", "environment"):
        named.append({"name": name, "inputSchema": EMPTY})
    named.append({"name": "die_once", "inputSchema": EMPTY})
    for name, hint in (("die_once_safe", "idempotentHint"), ("read_only_die", "readOnlyHint")):
        named.append({"name": name, "inputSchema": EMPTY, "annotations": {hint: True}})
    return [*named, {"name": "wide", "description": "Wide.", "inputSchema": SCHEMA}]


def list_tools(params: Any) -> Any:
    """All at once, or two a page."""
    found = tools()
    if "pages" not in MODES:
        return {"tools": found}
    start = int(params.get("cursor", 0))
    page: dict[str, Any] = {"tools": found[start : start + 2]}
    if start + 2 < len(found):
        page["nextCursor"] = str(start + 2)
    if "endless" in MODES:
        page = {"tools": found[:1], "nextCursor": str(start + 1)}
    return page


def call(name: str, arguments: Any) -> Any:
    """The text of a result, or something else."""
    global count
    if name == "inc":
        count += 1
        return str(count)
    if name == "pid":
        return str(os.getpid())
    if name == "environment":
        lines = [f"{key}={value}" for key, value in os.environ.items()]
        return "\n".join([*lines, f"folder {os.getcwd()}"])
    if name == "hang":
        time.sleep(3600)
    if name.startswith("die_once"):
        if os.path.exists(arguments["flag"]):
            return "lived"
        open(arguments["flag"], "w").close()
    if "die" in name:
        sys.stderr.write("secret words\n")
        os._exit(7)
    if name == "flood":
        sys.stdout.write("x" * (20 * 2**20))
        sys.stdout.flush()
        time.sleep(3600)
    if name == "children":
        # A daemon: in a session of its own, and no longer our child.
        code = "import os, time\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\ntime.sleep(3600)"
        arguments = [sys.executable, "-S", "-c", code]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as child:
            assert child.stdout is not None
            return child.stdout.readline().decode().strip()
    return {"wrong": "shape"} if name == "bad_result" else None


def answer(method: str, params: Any) -> Any:
    """The result of a request, or an error."""
    if method == "initialize":
        if "modern_only" in MODES:
            data = {"supported": [MODERN], "requested": params.get("protocolVersion")}
            return None, {"code": -32022, "message": "Unsupported protocol version", "data": data}
        return {
            "protocolVersion": HANDSHAKE,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        }, None
    if method == "server/discover" and "modern_only" in MODES:
        return {"supportedVersions": [MODERN], "capabilities": {"tools": {}}}, None
    if method == "ping":
        return {}, None
    if method == "tools/list":
        return list_tools(params), None
    if method == "tools/call":
        if params["name"] == "refuse":
            return None, {"code": -32602, "message": "no such table"}
        found = call(params["name"], params.get("arguments") or {})
        if isinstance(found, str):
            return {"content": [{"type": "text", "text": found}]}, None
        return found, None
    return None, {"code": -32601, "message": f"Method not found: {method}"}


def main() -> None:
    """Answers one request at a time."""
    if "exit" in MODES:
        sys.exit("cannot find the database")
    if "stubborn" in MODES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "garbage" in MODES:
        sys.stdout.buffer.write(b"Welcome to this server!\n\n{not json}\n\xff\xfe\n")
    if "noisy" in MODES:
        sys.stderr.write("noise\n" * 200_000)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "silent" in MODES:
            continue
        result, error = answer(request["method"], request.get("params") or {})
        if result is not None and "modern_only" in MODES:
            result.update(resultType="complete", ttlMs=0, cacheScope="public")
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        reply |= {"error": error} if error else {"result": result}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    while "stubborn" in MODES:
        time.sleep(1)


main()
