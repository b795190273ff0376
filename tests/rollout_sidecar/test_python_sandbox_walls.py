"""What the program can see and reach: nothing of the host, the sidecar or other calls, by no file, socket or call."""

import os
import socket
from pathlib import Path
from textwrap import dedent

import pytest
import pytest_asyncio
from sandbox_cases import open_sandbox

from rollout_sidecar.tools.python_sandbox import PythonSandbox
from rollout_sidecar.tools.python_sandbox.inside import syscall_filter

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-that-only-the-sidecar-has"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    os.environ["ROLLOUT_SIDECAR_TEST_TOKEN"] = TOKEN
    try:
        async with open_sandbox(wall_s=5.0) as box:
            yield box
    finally:
        del os.environ["ROLLOUT_SIDECAR_TEST_TOKEN"]


async def output(box: PythonSandbox, code: str) -> str:
    """What a program prints that must not fail."""
    result = await box.run(dedent(code))
    assert result.status == "ok", result
    return result.stdout


# --- files and processes ----------------------------------------------------------------------------------------


async def test_the_whole_tree_of_files_is_the_systems(box):
    seen = set((await output(box, "import os; print(*os.listdir('/'))")).split())
    assert seen <= {
        *("bin", "dev", "etc", "lib", "lib32", "lib64", "nix", "proc", "run", "sandbox", "sbin"),
        *("tmp", "usr"),
    }
    assert set((await output(box, "import os; print(*os.listdir('/etc'))")).split()) <= {
        *("alternatives", "ld.so.cache", "ld.so.conf"),
    }


async def test_the_host_and_the_sidecar_cannot_be_read(box, tmp_path):
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o644)
    paths = [secret, Path(__file__), Path.home(), "/etc/passwd", "/etc/shadow", "/root", "/home"]
    for path in map(str, paths):
        assert (await output(box, f"import os; print(os.path.exists({path!r}))")) == "False\n"


async def test_nothing_can_be_written_outside_the_work_folder(box):
    code = """
        import os
        for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/bin/python3", "/run/x", "/proc/x", "/usr/lib/x"):
            try: open(path, "w")
            except OSError as error: print(type(error).__name__, end=" ")
            else: print("WROTE", path)
        for path in ("/sandbox", "/tmp", "/dev/shm"):
            open(path + "/x", "w").write("y")
    """
    assert set((await output(box, code)).split()) <= {
        *("OSError", "PermissionError", "FileNotFoundError", "IsADirectoryError"),
    }


async def test_links_out_of_the_work_folder_lead_nowhere(box, tmp_path):
    (tmp_path / "secret").write_text(TOKEN)
    code = f"""
        import os
        os.symlink({str(tmp_path / "secret")!r}, "link")
        os.symlink("../../../../../../../..{tmp_path}", "up")
        os.symlink("/proc/1/root", "init")
        for path in ("link", "up/secret", "init{tmp_path}/secret", "/proc/self/cwd/../..{tmp_path}/secret"):
            try: print(open(path).read())
            except OSError as error: print(type(error).__name__)
    """
    found = (await output(box, code)).split()
    assert len(found) == 4
    assert set(found) <= {"FileNotFoundError", "PermissionError"}


async def test_no_environment_but_a_fixed_one(box):
    assert TOKEN in os.environ.values()
    code = """
        import glob, os
        print(sorted(os.environ))
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try: print(open(path).read())
            except OSError: print("unreadable")
    """
    text = await output(box, code)
    assert TOKEN not in text
    assert text.startswith("['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'MKL_NUM_THREADS', 'MPLBACKEND'")


async def test_no_processes_but_its_own(box):
    code = (
        "import os; print(sorted(int(x) for x in os.listdir('/proc') if x.isdigit()), os.getpid())"
    )
    assert (await output(box, code)) == "[1, 2] 2\n"
    memory = await box.run("open('/proc/1/mem', 'rb')")
    assert "PermissionError" in memory.stderr


async def test_neither_rights_nor_descriptors(box):
    code = """
        import os
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        print([int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")])
        print(status["NoNewPrivs"].strip(), os.getresuid(), os.getgroups(), os.getsid(0))
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
    """
    # 3 and 4 lead to the supervisor: requests, and the note that a call is over.
    assert (await output(box, code)) == dedent("""\
        [0, 0, 0, 0, 0]
        1 (1000, 1000, 1000) [] 1
        [0, 1, 2, 3, 4]
    """)


async def test_nothing_of_earlier_calls_is_in_memory(box):
    """The process that calls are forked from never sees their code."""
    # The mark itself stands in neither of the two programs that look for it.
    await box.run(
        "mark = 'sesame' + '-in-memory'; keep = [mark * 100 for _ in range(1000)]",
        stdin="rosebud" * 50,
    )
    code = """
        found = 0
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if "[v" in line or "r" not in rights: continue
                start, end = (int(x, 16) for x in span.split("-"))
                memory.seek(start)
                content = memory.read(end - start)
                found += content.count(bytes.fromhex("726f7365627564726f736562"))
                found += content.count(bytes.fromhex("736573616d65"))
        print(found)
    """
    assert (await output(box, code)) == "0\n"


# --- network ----------------------------------------------------------------------------------------------------


async def test_neither_loopback_nor_metadata_nor_the_world(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import socket
            for address in (("127.0.0.1", {port}), ("169.254.169.254", 80), ("192.0.2.1", 53), ("::1", {port})):
                try: socket.create_connection(address, timeout=1)
                except OSError as error: print(type(error).__name__, error.errno)
                else: print("CONNECTED", address)
            try: socket.getaddrinfo("example.com", 80)
            except OSError as error: print(type(error).__name__)
        """
        assert (await output(box, code)).split("\n")[:-1] == [
            "ConnectionRefusedError 111",
            "OSError 101",
            "OSError 101",
            "ConnectionRefusedError 111",
            "gaierror",
        ]


async def test_the_policy_is_told_that_there_is_no_network(box):
    code = "import urllib.request; urllib.request.urlopen('http://192.0.2.1')"
    assert (await box.run(code)).reason == "There is no network in the sandbox."


async def test_unix_sockets_of_the_host_are_out_of_reach(box):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0python-sandbox-test")
        server.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect('\\0python-sandbox-test')"
        assert "ConnectionRefusedError" in (await box.run(code)).stderr


async def test_a_program_may_serve_itself(box):
    code = """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        print(socket.create_connection(server.getsockname()).getpeername()[0])
    """
    assert (await output(box, code)) == "127.0.0.1\n"


@pytest.mark.skipif(syscall_filter.build(os.uname().machine) is None, reason="no filter here")
async def test_only_internet_and_unix_sockets(box):
    code = """
        import socket
        for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET, 38):  # 38: AF_ALG
            try: socket.socket(family, socket.SOCK_DGRAM)
            except OSError as error: print(error.errno, end=" ")
    """
    assert (await output(box, code)) == "97 97 97 97 "


# --- system calls -----------------------------------------------------------------------------------------------

CALLS = {
    "unshare(CLONE_NEWUSER)": "libc.unshare(0x10000000)",
    "unshare(CLONE_NEWNS)": "libc.unshare(0x20000)",
    "setns": "libc.setns(0, 0)",
    "mount": 'libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)',
    "umount": 'libc.umount2(b"/proc", 2)',
    "remount": 'libc.mount(b"none", b"/usr", None, 0x1020, None)',
    "chroot": 'libc.chroot(b"/tmp")',
    "pivot_root": 'libc.syscall(155, b"/tmp", b"/tmp")',
    "ptrace": "libc.ptrace(16, 1, 0, 0)",
    "process_vm_readv": "libc.process_vm_readv(1, 0, 0, 0, 0, 0)",
    "keyctl": "libc.syscall(250, 0, -4, 1)",
    "add_key": 'libc.syscall(248, b"user", b"x", b"y", 1, -4)',
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "perf_event_open": "libc.syscall(298, 0, 0, -1, -1, 0)",
    "io_uring_setup": "libc.syscall(425, 1, 0)",
    "userfaultfd": "libc.syscall(323, 0)",
    "setuid": "libc.setuid(0)",
    "sethostname": 'libc.sethostname(b"x", 1)',
    "reboot": "libc.reboot(0)",
    "mknod of a disk": 'libc.mknod(b"/tmp/disk", 0o60666, 0xFE00)',
    "a clone with namespaces": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, 0, 0)",
    "a call of another architecture": "libc.syscall(0x40000000 | 39)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("call", CALLS)
async def test_system_calls_that_are_refused(box, call):
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({CALLS[call]}, ctypes.get_errno())"
    # EPERM, EINVAL of a process that may not be changed so, or ENOSYS: libc then uses the older clone.
    assert (await output(box, code)).strip() in ("-1 1", "-1 22", "-1 38")
    assert (await output(box, "print('ok')")) == "ok\n"


async def test_limits_cannot_be_raised(box):
    code = """
        import resource
        for name in ("AS", "NPROC", "FSIZE", "NOFILE", "CORE"):
            number = getattr(resource, "RLIMIT_" + name)
            try: resource.setrlimit(number, (2 ** 40, 2 ** 40))
            except (ValueError, OSError) as error: print(type(error).__name__, end=" ")
    """
    assert (await output(box, code)) == "ValueError " * 5


async def test_set_uid_programs_are_not(box):
    code = "import os, subprocess; print(subprocess.run(['su', '-c', 'id'], capture_output=True).returncode > 0)"
    assert (await output(box, code)) == "True\n"
