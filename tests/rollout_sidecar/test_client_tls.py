"""https: a sidecar with a certificate of its own, and every way in which a certificate may be the wrong one."""

import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from sidecar_cases import Push, make_agent, make_request

from rollout_sidecar.client import SidecarClient, SidecarError
from rollout_sidecar.server import ServerOptions, Sidecar, create_app


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Makes a self-signed certificate for a name: the files of certificate and key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str, days: int = 2):
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        kind = "IP" if name[0].isdigit() else "DNS"
        command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days)]
        command += ["-keyout", str(key), "-out", str(cert), "-subj", f"/CN={name}"]
        command += ["-addext", f"subjectAltName={kind}:{name}"]
        subprocess.run(command, check=True, capture_output=True)
        return cert, key

    return make


@asynccontextmanager
async def serving_tls(agent, cert, key):
    """A sidecar behind TLS on a free port: the port."""
    sidecar = Sidecar(agent, ServerOptions())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    runner = web.AppRunner(create_app(sidecar), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    await sidecar.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await sidecar.stop()
        await runner.cleanup()


async def test_rollouts_and_weights_over_tls(tiny_tokenizer, certificates):
    cert, key = certificates("127.0.0.1")
    push = Push()
    async with serving_tls(make_agent(tiny_tokenizer, ["#### 2"]), cert, key) as port:
        url = f"https://127.0.0.1:{port}"
        async with SidecarClient(url, ca_file=str(cert)) as client:
            assert (await client.info()).policy_version == 0
            assert (await client.push_weights(1, push.manifest, push.read)).version == 1
            found = [trajectory async for trajectory in client.rollouts(make_request(samples=2))]
            assert [span.policy_version for t in found for span in t.version_spans] == [1, 1]
            assert await client.ready(1)


async def test_a_certificate_that_is_not_trusted_says_what_to_set(tiny_tokenizer, certificates):
    cert, key = certificates("127.0.0.1")
    other, _ = certificates("localhost")
    async with serving_tls(make_agent(tiny_tokenizer, ["#### 2"]), cert, key) as port:
        url = f"https://127.0.0.1:{port}"
        for ca_file in ("", str(other)):
            async with SidecarClient(url, ca_file=ca_file) as client:
                for ask in (client.info(), anext(client.rollouts(make_request()))):
                    with pytest.raises(
                        SidecarError,
                        match=rf"{url}: .* \(self.signed certificate.*\); name the file .*"
                        r"sidecar\.ca_file",
                    ) as caught:
                        await ask
                    assert (caught.value.kind, caught.value.status) == ("tls", 0)


async def test_a_certificate_of_another_name_says_so(tiny_tokenizer, certificates):
    cert, key = certificates("sidecar.example")
    async with serving_tls(make_agent(tiny_tokenizer, []), cert, key) as port:
        async with SidecarClient(f"https://127.0.0.1:{port}", ca_file=str(cert)) as client:
            with pytest.raises(
                SidecarError,
                match=r"mismatch.*write its name as in the certificate in sidecar\.urls",
            ):
                await client.info()


async def test_https_to_a_sidecar_without_tls_and_the_reverse(tiny_tokenizer, certificates):
    cert, key = certificates("127.0.0.1")
    agent = make_agent(tiny_tokenizer, [])
    sidecar = Sidecar(agent, ServerOptions())
    runner = web.AppRunner(create_app(sidecar), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with SidecarClient(f"https://127.0.0.1:{port}", ca_file=str(cert)) as client:
        with pytest.raises(SidecarError, match=r"if it serves no TLS, write http:// in sidecar"):
            await client.info()
    await runner.cleanup()
    async with serving_tls(agent, cert, key) as port:
        async with SidecarClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(SidecarError, match="write https:// in sidecar.urls"):
                await client.info(retries=0)


def test_a_file_without_certificates_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"sidecar\.ca_file='/no/such' cannot be used \(No such"):
        SidecarClient("https://127.0.0.1:1", ca_file="/no/such")
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    with pytest.raises(ValueError, match=rf"sidecar\.ca_file='{file}' cannot be used .*PEM file"):
        SidecarClient("https://127.0.0.1:1", ca_file=str(file))
