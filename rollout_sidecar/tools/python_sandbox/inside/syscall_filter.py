"""A seccomp filter for the program: system calls that no Python program needs, and that leave or load the kernel.

It refuses (EPERM) new namespaces, mounts, tracing, keys, BPF, io_uring and the like. It also closes the ways to hold
memory that belongs to no process and no tmpfs, and so escapes every limit: memfd_create and System V IPC. Sockets may
be Unix or internet ones; AF_VSOCK, which network namespaces do not confine, may not.
"""

import ctypes
import os
import struct

from rollout_sidecar.tools.python_sandbox.inside import syscalls

_ALIKE = {  # numbers that x86_64 and aarch64 share
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
}
_X86_64 = {
    **{"shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66},
    **{"shmdt": 67, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "ptrace": 101},
    **{"syslog": 103, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "chroot": 161},
    **{"acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167},
    **{"swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172},
    **{"ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179},
    **{"lookup_dcookie": 212, "semtimedop": 220, "clock_settime": 227, "mq_open": 240},
    **{"kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272},
    **{"move_pages": 279, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303},
    **{"open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310},
    **{"process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319},
    **{"kexec_file_load": 320, "bpf": 321, "userfaultfd": 323},
}
_AARCH64 = {
    **{"lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51},
    **{"vhangup": 58, "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104},
    **{"init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116},
    **{"ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162},
    **{"settimeofday": 170, "mq_open": 180, "msgget": 186, "msgctl": 187, "msgrcv": 188},
    **{"msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193},
    **{"shmget": 194, "shmctl": 195, "shmat": 196, "shmdt": 197, "add_key": 217},
    **{"request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "move_pages": 239},
    **{"perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264},
    **{"open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270},
    **{"process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279},
    **{"bpf": 280, "userfaultfd": 282, "kexec_file_load": 294},
}
_CLONE3 = 435

# machine: (AUDIT_ARCH, clone, socket, refused)
_MACHINES = {
    "x86_64": (0xC000003E, 56, 41, {**_ALIKE, **_X86_64}),
    "aarch64": (0xC00000B7, 220, 198, {**_ALIKE, **_AARCH64}),
}

_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag that clone takes
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97


def build(machine: str) -> bytes | None:
    """The filter's program for a machine as `uname -m` names it; None where we have none."""
    if machine not in _MACHINES:
        return None
    arch, clone, socket, refused = _MACHINES[machine]
    # Each jump is (operation, operand, label if true, label if false); "" is the next instruction.
    body = [
        (_LOAD, _ARCH_AT, "", ""),
        (_EQUAL, arch, "", "refuse"),
        (_LOAD, _NUMBER_AT, "", ""),
        (_AT_LEAST, 0x40000000, "refuse", ""),  # x32 calls on x86_64; no such number elsewhere
        (
            _EQUAL,
            _CLONE3,
            "no_such_call",
            "",
        ),  # its flags are out of a filter's sight; libc falls back to clone
        (_EQUAL, clone, "clone", ""),
        (_EQUAL, socket, "socket", ""),
        *((_EQUAL, number, "refuse", "") for number in sorted(refused.values())),
        (_RETURN, _ALLOW, "", ""),
        ("label", "clone"),
        (_LOAD, _FIRST_ARGUMENT_AT, "", ""),
        (_ANY_BIT, _NEW_NAMESPACE, "refuse", "allow"),
        ("label", "socket"),
        (_LOAD, _FIRST_ARGUMENT_AT, "", ""),
        *((_EQUAL, family, "allow", "") for family in _SOCKET_FAMILIES),
        (_RETURN, _ERRNO | _EAFNOSUPPORT, "", ""),
        ("label", "allow"),
        (_RETURN, _ALLOW, "", ""),
        ("label", "refuse"),
        (_RETURN, _ERRNO | _EPERM, "", ""),
        ("label", "no_such_call"),
        (_RETURN, _ERRNO | _ENOSYS, "", ""),
    ]
    labels, steps = {"": 0}, []
    for step in body:
        if step[0] == "label":
            labels[step[1]] = len(steps)
        else:
            steps.append(step)
    program = b""
    for at, (operation, operand, true, false) in enumerate(steps):
        jumps = [labels[label] - at - 1 if label else 0 for label in (true, false)]
        program += struct.pack("=HBBI", operation, *jumps, operand)
    return program


def install() -> bool:
    """Puts this process and all it will start under the filter. False if there is none for this machine."""
    if _PROGRAM is None:
        return False
    buffer = ctypes.create_string_buffer(_PROGRAM, len(_PROGRAM))
    header = struct.pack("@HP", len(_PROGRAM) // 8, ctypes.addressof(buffer))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, header)
    return True


_PROGRAM = build(os.uname().machine)
