"""Runs one call, or the calls of one session, on the safe side of the wall, and ends everything it started.

The program's process namespace ends with its process 1: the kernel kills whatever is in it, daemons and all, and
`waitpid` returns when the last is gone. Output is read here and cut here, limits are watched here, and the reply is
written here; the program holds no descriptor of the sidecar's socket.
"""

import json
import os
import select
import signal
import struct
import time
from typing import Any

from rollout_sidecar.tools.python_sandbox.inside import init, program, syscalls, watch
from rollout_sidecar.tools.python_sandbox.inside.channel import Channel

END, CLOSED = 0, 3
"""What `supervise` returns: make the next supervisor, or the sidecar has closed the socket."""

FLOOD_FACTOR = 64
"""A program that writes this many times the output limit is ended; below that, what is too much is thrown away."""

_TICK_S, _TICK_MAX_S, _TICK_MANY_S = 0.025, 0.1, 0.02
"""How often limits are looked at: less and less for one process, whose memory the kernel limits exactly."""

_BASE_BYTES = 32 << 20
"""What an interpreter that does nothing takes, and more."""

_CHUNK = 1 << 16
_PIPE_CHUNKS = 1 + (1 << 20) // _CHUNK  # a program may make its pipe as large as that


def supervise(channel: Channel, config: dict[str, Any], *, announce: bool) -> int:
    """Makes a program's process ready, says so if it is to announce it, and serves requests until the process ends."""
    box = Box(config)
    try:
        if announce:
            box.wait_ready()
            channel.send({"status": "ready"})
        while True:
            request = channel.receive()
            if request is None:
                return CLOSED
            if request["op"] == "end":
                box.destroy()
                channel.send({"status": "ended"})
                return END
            header, outputs = box.run(request, channel.fd)
            channel.send(header, *outputs)
            if not header["alive"]:
                return END
    finally:
        box.destroy()


class Output:
    """One stream of a call: its first and last bytes, and a count of all."""

    def __init__(self, fd: int, limit: int):
        self.fd = fd
        self._half = limit - limit // 2
        self._rest = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def take(self) -> tuple[bytes, bytes]:
        """Head and tail; between them is what they lack of the total. Starts anew."""
        kept = bytes(self._head), bytes(self._tail)
        self._head, self._tail, self.total = bytearray(), bytearray(), 0
        return kept

    def read(self) -> bool:
        """Takes a chunk. False if there is none, now or for good."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        self.total += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        del self._tail[: max(0, len(self._tail) - self._rest)]
        return bool(chunk)

    def drain(self) -> None:
        """Takes what is there. What is written meanwhile, by processes that live on, is theirs to lose."""
        for _ in range(_PIPE_CHUNKS):
            if not self.read():
                break


class Box:
    """Init and the program below it, waiting for requests."""

    def __init__(self, config: dict[str, Any]):
        self._isolated: bool = config["isolated"]
        if not self._isolated:
            import tempfile  # behind the walls nobody needs it, and every import makes forks dearer

            config = {**config, "work_folder": tempfile.mkdtemp(prefix="python-sandbox-")}
        self._config = config
        self._program = 0
        self._ended = False
        out, err, requests, notes, life = (os.pipe() for _ in range(5))
        if self._isolated:
            syscalls.unshare(syscalls.CLONE_NEWPID)
        else:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        theirs = (requests[0], out[1], err[1], notes[1], life[1])
        self._init = os.fork()
        if self._init == 0:
            init.run(config, *theirs)
        for fd in theirs:
            os.close(fd)
        self._out, self._err = (Output(pipe[0], config["output_bytes"]) for pipe in (out, err))
        self._requests, self._notes, self._life = requests[1], notes[0], life[0]
        for fd in (self._out.fd, self._err.fd, self._notes, self._requests):
            os.set_blocking(fd, False)
        self._watch = watch.Watch(self._init, isolated=self._isolated)

    def wait_ready(self) -> None:
        """Returns when the program waits for its first request. RuntimeError if it could not be confined."""
        if self._program:
            return
        if os.read(self._life, 1) != init.READY:
            raise RuntimeError(os.read(self._life, _CHUNK).decode() or "init ended")
        (self._program,) = self._watch.usage().pids

    def run(self, request: dict[str, Any], channel_fd: int) -> tuple[dict[str, Any], list[bytes]]:
        """One call. The header says how it ended, and whether the program is there for another."""
        self.wait_ready()
        call = Call(self._config, self._watch, (self._out, self._err))
        watch.kill(self._program, signal.SIGCONT)
        end = call.wait(request, self._requests, self._notes, self._life, channel_fd)
        run_s = call.run_s()
        alive = end["how"] == "note" and request["keep"] and self._rest()
        if end["how"] == "limit":
            self.destroy()
        for output in (self._out, self._err):
            output.drain()
        totals = [self._out.total, self._err.total]
        header = {**end, "alive": alive, "run_s": run_s, "totals": totals}
        return header, [*self._out.take(), *self._err.take()]

    def destroy(self) -> None:
        """Ends init, and with it everything else."""
        if self._ended:
            return
        self._ended = True
        watch.kill(self._init)
        os.waitpid(self._init, 0)
        while not self._isolated:  # orphans have come to this process
            left = watch.descendants(os.getpid(), watch.all_pids())
            for pid in left:
                watch.kill(pid)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                import shutil

                shutil.rmtree(self._config["work_folder"], ignore_errors=True)
                break

    def _rest(self) -> bool:
        """Between calls of a session the program stands still, and what it started is gone. False: end the session."""
        watch.kill(self._program, signal.SIGSTOP)
        return self._watch.kill_others(self._program)


class Call:
    """Waits for the end of one call, and ends the waiting at a limit."""

    def __init__(
        self, config: dict[str, Any], watching: watch.Watch, outputs: tuple[Output, Output]
    ):
        self._config = config
        self._watch = watching
        self._outputs = outputs
        self._cpu_before_s = watching.usage().cpu_s
        self._started = time.monotonic()
        self._note = ""

    def run_s(self) -> float:
        """Since the call began."""
        return time.monotonic() - self._started

    def wait(
        self, request: dict[str, Any], requests: int, notes: int, life: int, channel: int
    ) -> dict[str, Any]:
        """Until the program ends, notes that it is done, or reaches a limit."""
        ahead = _frame(request)
        poll = select.poll()
        for fd in (*(output.fd for output in self._outputs), life, notes, channel):
            poll.register(fd, select.POLLIN)
        poll.register(requests, select.POLLOUT)
        tick_s = next_look_s = _TICK_S
        while (now_s := self.run_s()) < request["wall_s"]:
            if now_s >= next_look_s:
                limit, many = self._look()
                if limit:
                    return _end("limit", limit)
                tick_s = _TICK_MANY_S if many else min(2 * tick_s, _TICK_MAX_S)
                next_look_s = now_s + tick_s
            until_s = min(request["wall_s"], next_look_s)
            ready = {fd for fd, _ in poll.poll(1 + 1000 * (until_s - now_s))}
            if (
                channel in ready
            ):  # nothing is sent during a call: the sidecar gave it up, or is gone
                return _end("limit", "given_up")
            if requests in ready:
                ahead = _feed(requests, ahead)
                if not ahead:
                    poll.unregister(requests)
            if not self._read(poll, ready):
                return _end("limit", "output")
            if notes in ready:
                poll.unregister(notes)
                code = self._take_note(notes)
                if code is not None:
                    return _end("note", self._note, code)
            if life in ready:
                return _end("exit", self._note, init.exit_code(life))
        return _end("limit", "wall")

    def _read(self, poll: select.poll, ready: set[int]) -> bool:
        """Takes what was written. False if it is a flood."""
        for output in self._outputs:
            if output.fd in ready and not output.read():
                poll.unregister(output.fd)
        total = sum(output.total for output in self._outputs)
        return total <= FLOOD_FACTOR * self._config["output_bytes"]

    def _take_note(self, notes: int) -> int | None:
        data = os.read(notes, program.NOTE.size)
        if len(data) < program.NOTE.size:
            return None
        kind, code = program.NOTE.unpack(data)
        self._note = program.NOTES.get(kind, "")
        return code & 0xFF

    def _look(self) -> tuple[str, bool]:
        """The limit that was reached, if any, and whether there is more than one process."""
        self._watch.yield_to_others()
        usage = self._watch.usage()
        many = len(usage.pids) > 1
        if usage.cpu_s - self._cpu_before_s > self._config["cpu_s"]:
            return "cpu", many
        if usage.tasks > self._config["max_processes"]:
            return "processes", many
        allowed = self._config["memory_bytes"] + _BASE_BYTES
        if usage.resident_bytes > allowed:
            if watch.exact_memory_bytes(usage.pids, otherwise=usage.resident_bytes) > allowed:
                return "memory", many
        return "", many


def _end(how: str, what: str, code: int | None = None) -> dict[str, Any]:
    return {"how": how, "what": what, "code": code}


def _frame(request: dict[str, Any]) -> bytes:
    body = json.dumps({key: request[key] for key in ("code", "stdin", "keep")}).encode()
    return struct.pack("!I", len(body)) + body


def _feed(fd: int, ahead: bytes) -> bytes:
    """Writes what fits; returns the rest. A program that has closed its end gets nothing more."""
    try:
        return ahead[os.write(fd, ahead) :]
    except BlockingIOError:
        return ahead
    except BrokenPipeError:
        return b""
