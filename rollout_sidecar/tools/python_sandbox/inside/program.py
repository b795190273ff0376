"""Runs the code of one call, or of all calls of a session, as Python would run a file.

Everything here shares a process with the code, which may break it. So nothing here decides anything: what it notes for
the supervisor only chooses the words in which an ordinary failure is told.
"""

import ast
import atexit
import builtins
import errno
import json
import linecache
import os
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

NOTE = struct.Struct("!ci")
"""What went wrong, as one of NOTES, and the exit code."""

NOTES = {
    b"-": "",
    b"m": "memory",
    b"p": "processes",
    b"f": "files",
    b"d": "disk",
    b"n": "network",
}
_BY_ERRNO = {
    errno.EAGAIN: b"p",
    errno.ENOMEM: b"m",
    errno.EMFILE: b"f",
    errno.ENOSPC: b"d",
    errno.EFBIG: b"d",
    errno.ENETUNREACH: b"n",
}
_FILE = "main.py"


def serve(requests: int, notes: int, *, last_value: bool) -> NoReturn:
    """Runs what comes, until the end of the pipe."""
    pid = os.getpid()
    main = _fresh_main()
    while True:
        request = _receive(requests)
        if request is None:
            os._exit(0)
        _set_standard_streams(request["stdin"])
        kind, code = _run(request["code"], main, last_value)
        if os.getpid() != pid:  # the code forked, and this is the child at the end of the program
            _finish()
            os._exit(code)
        if not request["keep"]:
            code = _finish() or code
        _flush()
        try:
            os.write(notes, NOTE.pack(kind, code))
        except OSError:
            os._exit(code or 1)
        if not request["keep"]:
            os._exit(code)


def _run(code: str, main: types.ModuleType, last_value: bool) -> tuple[bytes, int]:
    lines = code.splitlines(keepends=True)
    # A file without a time of last change is never looked for on the disk.
    linecache.cache[_FILE] = (len(code), None, lines, _FILE)
    try:
        _execute(code, main.__dict__, last_value)
    except SystemExit as error:
        return b"-", _exit_code(error.code)
    except BaseException as error:
        _print(error)
        return _kind(error), 1
    return b"-", 0


def _execute(code: str, namespace: dict[str, Any], last_value: bool) -> None:
    if not last_value:
        exec(compile(code, _FILE, "exec"), namespace)
        return
    tree = ast.parse(code, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _FILE, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _FILE, "eval"), namespace)
        if value is not None:
            print(repr(value))


def _print(error: BaseException) -> None:
    """The traceback from the code's own first frame on."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    except BaseException:
        # Its own text cannot be had, or there is no memory left to make it.
        try:
            os.write(2, type(error).__name__.encode() + b"\n")
        except BaseException:
            pass


def _kind(error: BaseException | None) -> bytes:
    for _ in range(8):
        if isinstance(error, MemoryError):
            return b"m"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return b"p"
        if isinstance(error, OSError):
            if type(error).__name__ == "gaierror":
                return b"n"
            if error.errno in _BY_ERRNO:
                return _BY_ERRNO[error.errno]
        if error is None:
            break
        reason = getattr(error, "reason", None)  # urllib's
        error = reason if isinstance(reason, OSError) else error.__cause__ or error.__context__
    return b"-"


def _exit_code(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _finish() -> int:
    """What an interpreter does before it exits, as far as the code can see it: waits for threads, calls atexit."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        atexit._run_exitfuncs()
    except BaseException as error:
        _print(error)
        return 1
    finally:
        _flush()
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass


def _set_standard_streams(stdin: str) -> None:
    if stdin:
        path = f"/tmp/.stdin-{os.getpid()}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.unlink(path)
        with open(os.dup(fd), "wb") as file:
            file.write(stdin.encode("utf-8", "surrogatepass"))
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fd = os.open("/dev/null", os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    # By lines: what was printed before a limit was reached is kept.
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout.reconfigure(line_buffering=True)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr.reconfigure(line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _fresh_main() -> types.ModuleType:
    """A __main__ as a file has it, and no trace of ours in the modules."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollout_sidecar"]:
        del sys.modules[name]
    sys.modules["__main__"] = main
    sys.argv = [_FILE]
    sys.path[0] = ""
    return main


def _receive(fd: int) -> dict[str, Any] | None:
    try:
        size = _read(fd, 4)
        body = _read(fd, struct.unpack("!I", size)[0])
    except (OSError, EOFError):
        return None
    return json.loads(body)


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
