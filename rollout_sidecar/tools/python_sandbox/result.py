"""How a call ended, as data and in words for the policy."""

import codecs
import re
from dataclasses import dataclass
from signal import Signals
from typing import Any, Literal

from rollout_sidecar.tools.python_sandbox.options import SandboxOptions

SandboxStatus = Literal[
    "ok",
    "error",  # an exception, or an exit code that is not 0
    "timeout",  # the limit of wall time or of processor time
    "memory",  # an allocation failed, or all processes together had too much
    "processes",  # more processes or threads than allowed (most often a failed start is an "error" instead)
    "output_limit",  # a flood of output; less than a flood is cut, which is no failure
    "killed",  # ended by a signal of its own doing, as in a crash
    "too_long",  # the code itself; it was not run
    "lost",  # the sandbox broke: not the code's fault, unless it found a way
]

MAX_CODE_CHARACTERS = 1 << 20
"""Of code and stdin each."""

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # other strings
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_HINTS = {
    "memory": "the memory limit of {memory_mb} MB was reached",
    "processes": "the limit of {max_processes} processes and threads was reached",
    "files": "the limit of {max_files} open files was reached",
    "disk": "the limit of {disk_mb} MB of files was reached",
    "network": "there is no network in the sandbox",
}
_STATE_LOST = " The variables of earlier calls are gone."


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What a call did."""

    status: SandboxStatus
    stdout: str = ""
    """Text without control characters and terminal escapes; bytes that are no UTF-8 are U+FFFD."""
    stderr: str = ""
    exit_code: int | None = None
    """None where the call was ended from outside."""
    run_s: float = 0.0
    queue_s: float = 0.0
    """Time spent waiting for a free worker."""
    reason: str = ""
    """A sentence for the policy where it should know more than the output tells; "" if all is well."""

    def text(self) -> str:
        """For a tool message: stdout, stderr, the reason."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.reason:
            parts.append(f"[{self.reason}]")
        return "\n".join(part for part in parts if part) or "(no output)"


def make_result(
    header: dict[str, Any],
    outputs: list[bytes],
    options: SandboxOptions,
    *,
    wall_s: float,
    queue_s: float,
    session: bool,
) -> SandboxResult:
    """From a worker's reply."""
    status, reasons = _judge(header, options, wall_s)
    texts = []
    for i, name in enumerate(("stdout", "stderr")):
        head, tail = outputs[2 * i : 2 * i + 2]
        missing = header["totals"][i] - len(head) - len(tail)
        texts.append(clean(head, tail, missing))
        if missing and status != "output_limit":
            reasons.append(f"{name} was longer than {options.output_bytes} bytes")
    reason = _sentence(reasons)
    if session and not header["alive"]:
        reason = (reason or "The program ended itself.") + _STATE_LOST
    stdout, stderr = texts
    return SandboxResult(
        status=status,
        stdout=stdout,
        stderr=stderr,
        exit_code=header["code"],
        run_s=header["run_s"],
        queue_s=queue_s,
        reason=reason,
    )


def clean(head: bytes, tail: bytes = b"", missing: int = 0) -> str:
    """Output as text that a chat template can hold: no NUL, no escapes, no invalid UTF-8.

    Strings that look like a chat template's tokens are left as they are: it is for the conversation to encode them as
    plain text.
    """
    if not missing:
        return _clean((head + tail).decode("utf-8", "replace"))
    # A character may have been cut in two on either side: that is not the program's doing.
    before = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    after = re.sub(rb"^[\x80-\xbf]{1,3}", b"", tail).decode("utf-8", "replace")
    return f"{_clean(before)}\n... ({missing} bytes left out) ...\n{_clean(after)}"


def _clean(text: str) -> str:
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub("", text)


def _judge(
    header: dict[str, Any], options: SandboxOptions, wall_s: float
) -> tuple[SandboxStatus, list[str]]:
    what, code = header["what"], header["code"]
    limits = {**vars(options), "wall_s": wall_s}
    if header["how"] == "limit":
        status, reason = _LIMITS[what]
        return status, [f"{reason.format(**limits)}, and the program was stopped"]
    reasons = [_HINTS[what].format(**limits)] if what in _HINTS else []
    if code == 0:
        return "ok", []
    if what == "memory":
        return "memory", reasons
    if code is not None and code < 0:
        return "killed", [_signal(-code)]
    if not reasons and code not in (1, None):
        reasons = [f"the program ended with exit code {code}"]
    return "error", reasons


_LIMITS: dict[str, tuple[SandboxStatus, str]] = {
    "wall": ("timeout", "the time limit of {wall_s:g} s was reached"),
    "cpu": ("timeout", "the limit of {cpu_s:g} s of processor time was reached"),
    "memory": ("memory", "the memory limit of {memory_mb} MB was reached"),
    "processes": ("processes", "the limit of {max_processes} processes and threads was reached"),
    "output": ("output_limit", "the program wrote far more than the limit of {output_bytes} bytes"),
    "given_up": ("lost", "the call was given up"),
}


def _signal(number: int) -> str:
    try:
        name = Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = ", as by a recursion that is too deep" if name in ("SIGSEGV", "SIGBUS") else ""
    return f"the program was ended by {name}{hint}"


def _sentence(reasons: list[str]) -> str:
    text = "; ".join(reasons)
    return f"{text[0].upper()}{text[1:]}." if text else ""
