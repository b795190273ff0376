"""SGLang's processes: started with what they log kept, watched, and ended; none that is not SGLang's is ever touched.

Left alone, SGLang kills the process that it is used in (SIGKILL) when one of its own fails, takes SIGTERM over with the
first request, and kills every child of this process when it is shut down, tools included. Here a failure is a call to
`on_failure`, SIGTERM goes on as SIGINT, and only SGLang's processes are ended.
"""

import asyncio
import atexit
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from rollout_sidecar.engines import sglang_metrics
from rollout_sidecar.engines.sglang_setup import make_engine, sglang_module

END_TIMEOUT_S = 10.0
"""How long killed processes may take to be gone, GPU memory included."""

KEPT_LINES = 400

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*")

_HINTS = (
    (
        r"out of memory|OutOfMemory|Not enough memory|not enough memory",
        "the model and its KV cache do not fit: use more GPUs (--tp), another --memory_fraction, or free the GPU",
    ),
    (
        r"No accelerator|No CUDA GPUs|no NVIDIA driver|NVML|CUDA driver|no CUDA-capable",
        "SGLang needs a GPU, and finds none here; tests/sglang/README.md tells how to try it on a CPU",
    ),
    (r"[Aa]ddress already in use|EADDRINUSE", "another process has a port that SGLang wants"),
    (r"(CUDA error: )?invalid device ordinal", "this machine has fewer GPUs than --tp times --dp"),
)

_log = logging.getLogger(__name__)


class SglangProcesses:
    """One `sglang.Engine` and its processes."""

    def __init__(self, on_failure: Callable[[str], None]):
        """Nothing runs before `start`.

        Args:
            on_failure: is told, in a sentence, when a process of SGLang ends by itself after the start.
        """
        self.log = LogTail()
        self._on_failure = on_failure
        self._engine: Any = None
        self._processes: list[Any] = []
        self._before: list[Any] = []
        self._making: threading.Thread | None = None
        self._ended = threading.Event()
        self._closed = False

    async def start(self, arguments: dict[str, Any]) -> Any:
        """Starts SGLang and returns its tokenizer manager, which runs in this event loop.

        ValueError says in a sentence why SGLang could not be started; nothing of it is left then.
        """
        loop = asyncio.get_running_loop()
        # A process that fails while it starts asks for this one's end, too; then make_engine raises by itself.
        loop.add_signal_handler(signal.SIGQUIT, _one_has_failed)
        sglang_metrics.open_folder()
        self._before = multiprocessing.active_children()
        # Off the loop, so that /healthz answers; SGLang then leaves the process's signals alone for now.
        made = loop.create_future()
        self._making = threading.Thread(
            target=self._make, args=(arguments, loop, made), daemon=True
        )
        self._making.start()
        _starting.append(self)
        try:
            self._engine = await made
        except Exception as error:
            await asyncio.to_thread(end_processes, self._made())
            raise ValueError(start_failure(error, self.log.lines())) from error
        finally:
            _starting.remove(self)
        self._processes = self._made()
        _started.append(self)
        atexit.unregister(self._engine.shutdown)
        manager = self._engine.tokenizer_manager
        manager.signal_handler_class = lambda _: _Signals()
        manager.auto_create_handle_loop()
        return manager

    def _make(self, arguments: dict[str, Any], loop: Any, made: asyncio.Future) -> None:
        """In a thread of its own: it may take minutes, and nothing waits for it when the sidecar is stopped.

        The thread lives as long as the processes: Linux ends them with the thread that made them.
        """

        def tell(call: Callable[..., None], value: object) -> None:
            with suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(lambda: None if made.done() else call(value))

        try:
            with _event_loop_policy_kept():
                sglang_module("srt.managers.tokenizer_manager")  # takes longest
                if self._closed:
                    return
                sglang_metrics.forget_names()
                with self.log.kept():
                    engine = make_engine(arguments)
        except Exception as error:
            tell(made.set_exception, error)
        else:
            tell(made.set_result, engine)
            self._ended.wait()

    async def close(self) -> None:
        """Ends SGLang's processes and waits until they are gone."""
        if self._closed:
            return
        self._closed = True
        if self in _started:
            _started.remove(self)
        if not _started:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        engine, self._engine = self._engine, None
        if engine is not None:
            manager = engine.tokenizer_manager
            watchdog = manager._subprocess_watchdog
            if watchdog is not None:
                await asyncio.to_thread(watchdog.stop)
            for task in list(manager.asyncio_tasks):
                task.cancel()
            if engine.send_to_rpc is not None:
                engine.send_to_rpc.close(linger=0)
        await asyncio.to_thread(self._end)
        if self._making is not None:
            sglang_metrics.close_folder()

    def _end(self) -> None:
        """Also those that a start which goes on in its thread still makes."""
        end_processes(self._processes)
        self._ended.set()
        making, deadline = self._making, time.monotonic() + END_TIMEOUT_S
        while making is not None and making.is_alive() and time.monotonic() < deadline:
            if not self.log.keeping:  # it is still importing, and makes nothing afterwards
                break
            end_processes(self._made())
            making.join(0.1)

    def _made(self) -> list[Any]:
        known = {id(process) for process in self._before}
        return [each for each in multiprocessing.active_children() if id(each) not in known]

    def tell_failure(self) -> None:
        """Tells `on_failure` which process is gone, or else what was raised last."""
        codes = [
            f"{process.name} (process {process.pid}) with exit code {process.exitcode}"
            for process in self._processes
            if not process.is_alive()
        ]
        cause = last_exception(self.log.lines()) or "see the lines above"
        self._on_failure(f"SGLang {f'ended: {codes[0]}' if codes else f'failed: {cause}'}")

    def has_lost_processes(self) -> bool:
        """Whether one that was started has ended."""
        return not all(process.is_alive() for process in self._processes)


_starting: list[SglangProcesses] = []
_started: list[SglangProcesses] = []
"""Those of this process, with data parallelism several."""


def _one_has_failed(signum=None, frame=None) -> None:
    """SIGQUIT: a process of SGLang has failed, or a watchdog found it gone."""
    fallen = [each for each in _started if each.has_lost_processes()]
    # A process may ask before it ends. While another engine starts it is rather that one's, and its start raises.
    for each in fallen or ([] if _starting else _started):
        each.tell_failure()


@contextmanager
def _event_loop_policy_kept() -> Iterator[None]:
    """SGLang makes uvloop's the default as it is imported; then asyncio's own loop, which runs already, can start no
    subprocess, and tools do (Python 3.11 to 3.13)."""
    policy = asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)


class _Signals:
    """What SGLang's tokenizer manager asks for when it takes signals over."""

    running_phase_sigquit_handler = staticmethod(_one_has_failed)

    @staticmethod
    def sigterm_handler(signum=None, frame=None) -> None:
        """Whoever had SIGTERM gets SIGINT, which SGLang does not take."""
        signal.raise_signal(signal.SIGINT)


class LogTail:
    """The last lines that child processes wrote to stderr, which gets them all the same."""

    def __init__(self):
        self.keeping = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()

    def lines(self) -> list[str]:
        """Oldest first."""
        with self._lock:
            return list(self._lines)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What processes that are started inside write to stderr is kept, as long as they live."""
        read_end, write_end = os.pipe()
        stderr = os.dup(2)
        threading.Thread(
            target=self._copy, args=(read_end, stderr), name="sglang-log", daemon=True
        ).start()
        os.dup2(write_end, 2)
        os.close(write_end)
        self.keeping = True
        try:
            yield
        finally:
            self.keeping = False
            sys.stderr.flush()
            os.dup2(stderr, 2)  # the copying thread closes its own when the last writer is gone

    def _copy(self, read_end: int, stderr: int) -> None:
        rest = b""
        while data := os.read(read_end, 2**16):
            with suppress(OSError):  # stderr may be gone; the writers must not block
                os.write(stderr, data)
            *lines, rest = (rest + data).split(b"\n")
            with self._lock:
                self._lines += [line.decode("utf-8", "replace") for line in lines]
        os.close(read_end)
        os.close(stderr)


def last_exception(lines: list[str]) -> str:
    """The last line that names an exception, "" if none does."""
    return next((line.strip() for line in reversed(lines) if _EXCEPTION.match(line)), "")


def start_failure(error: BaseException, lines: list[str]) -> str:
    """Why SGLang did not start, in a sentence: what its processes raised, and what can be done about it."""
    cause = last_exception(lines) or f"{type(error).__name__}: {error}"
    for pattern, hint in _HINTS:
        if re.search(pattern, cause) or re.search(pattern, str(error)):
            return f"SGLang did not start: {cause} - {hint}"
    return f"SGLang did not start: {cause}"


def end_processes(processes: list[Any]) -> None:
    """Kills processes and what they started; returns when they are gone, or after END_TIMEOUT_S."""
    if not processes:
        return
    kill_process_tree = sglang_module("srt.utils").kill_process_tree
    for process in processes:
        if process.is_alive():
            kill_process_tree(process.pid)
    deadline = time.monotonic() + END_TIMEOUT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            _log.warning("%s (process %s) does not end", process.name, process.pid)


def end_this_process(reason: str) -> NoReturn:
    """The default answer to a failure of SGLang: the sidecar ends at once, with exit code 1 and nothing left behind."""
    _log.error("%s; the sidecar ends", reason)
    sglang_module("srt.utils").kill_process_tree(os.getpid(), include_parent=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
