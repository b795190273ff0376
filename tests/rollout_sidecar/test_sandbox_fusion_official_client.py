"""The official client package (PyPI sandbox-fusion 0.3.7) against our test server: the server keeps the contract that
our client is tested with. Skips where the package is not installed."""

import base64

import pytest
from servers_sandbox_fusion import HAS_CPP, SandboxFusionServer

sandbox_fusion = pytest.importorskip("sandbox_fusion")


@pytest.fixture
async def server():
    async with SandboxFusionServer() as server:
        yield server


async def run(server, code, language="python", **fields):
    request = sandbox_fusion.RunCodeRequest(code=code, language=language, **fields)
    return await sandbox_fusion.run_code_async(request, endpoint=server.url, max_attempts=1)


async def test_a_program_that_works(server):
    encoded = base64.b64encode(b"1").decode()
    code = "open('b', 'w').write(open('a').read() + input()); print('done')"
    response = await run(server, code, stdin="2", files={"a": encoded}, fetch_files=["b"])
    assert response.status == sandbox_fusion.RunStatus.Success
    assert response.compile_result is None
    assert response.run_result.status == sandbox_fusion.CommandRunStatus.Finished
    assert (response.run_result.return_code, response.run_result.stdout) == (0, "done\n")
    assert {path: base64.b64decode(text) for path, text in response.files.items()} == {"b": b"12"}


async def test_programs_that_fail(server):
    response = await run(server, "1 / 0")
    assert response.status == sandbox_fusion.RunStatus.Failed
    assert response.run_result.return_code == 1
    assert "ZeroDivisionError" in response.run_result.stderr
    response = await run(server, "print('started', flush=True)\nwhile True: pass", run_timeout=0.5)
    assert response.status == sandbox_fusion.RunStatus.Failed
    assert response.run_result.status == sandbox_fusion.CommandRunStatus.TimeLimitExceeded
    assert (response.run_result.return_code, response.run_result.stdout) == (None, "started\n")


@pytest.mark.skipif(not HAS_CPP, reason="needs g++")
async def test_a_program_that_does_not_compile(server):
    response = await run(server, "int main() { return x; }", "cpp")
    assert response.status == sandbox_fusion.RunStatus.Failed
    assert response.compile_result.return_code == 1
    assert response.run_result is None


async def test_requests_that_are_refused(server):
    with pytest.raises(Exception, match="responded with code 422"):
        await run(server, "x", "lua")
    server.faults = ["SandboxError"]
    with pytest.raises(Exception, match="Sandbox responded with error: no free worker"):
        await run(server, "x")
