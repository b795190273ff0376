"""Runs Python that the policy wrote, for real, behind walls. Linux, with bubblewrap.

A pool of workers is kept warm. In each, bubblewrap has made new user, process, network, mount, IPC, UTS and cgroup
namespaces, and an interpreter waits in them (`inside`). For each call, or each session of calls, a process is forked
from it into a process namespace and a view of files of its own; both end with the call, and whatever the call started
ends with them, also if it is a daemon or ignores signals. The next one is made ready before it is asked for.

Covered:
- files: /usr, the interpreter's folders and `read_only_paths`, read-only; /sandbox, /tmp and /dev/shm, empty, in memory
  and limited in size. Nothing of the host's /home, /etc, /root, the project, or the sidecar's token.
- processes: none but the call's own can be seen, signalled or traced; the sidecar's environment is nowhere.
- network: none but a loopback of the worker's own. No AF_VSOCK, netlink or raw sockets.
- rights: an unprivileged user (nobody, if the sidecar is root), no capabilities, no new privileges, no further
  namespaces, and a seccomp filter on x86_64 and aarch64: no mounts, tracing, keys, BPF, io_uring and the like.
- limits: wall time, processor time, memory, processes and threads, open files, file sizes, output. The kernel holds
  those of each process; a watchdog in the worker adds up what all processes of a call use, 10 to 50 times a second.
- the reply comes from outside the walls: no output can forge it. Exit code and exception are the program's own words.
- a sidecar that dies, by SIGKILL too, takes its workers with it.

Not covered:
- faults of the kernel or of bubblewrap, and side channels (timing, caches). Against an adversary, rather than a policy
  in training, put the sidecar in a virtual machine.
- between two looks of the watchdog, processes that fork and allocate at once can have max_processes times memory_mb.
  Kernel memory (pipes, sockets, page tables) is bounded by the limits on files and processes only.
- other processors than x86_64 and aarch64 have no seccomp filter: AF_VSOCK and memory held by System V IPC or
  memfd_create are then out of the limits.
- before Linux 5.14 the limit on processes counts all processes of the user, those of other workers too.
- calls of one session share an interpreter: a call can change what later calls of that session see.
- `unsafe_without_isolation`: none of the walls; limits only.
"""

from rollout_sidecar.tools.python_sandbox.errors import SandboxUnavailableError
from rollout_sidecar.tools.python_sandbox.options import SandboxOptions
from rollout_sidecar.tools.python_sandbox.result import SandboxResult
from rollout_sidecar.tools.python_sandbox.sandbox import PythonSandbox, shared_sandbox

__all__ = [
    "PythonSandbox",
    "SandboxOptions",
    "SandboxResult",
    "SandboxUnavailableError",
    "shared_sandbox",
]
