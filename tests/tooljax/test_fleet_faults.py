"""What goes wrong with pushes beside dying sidecars: two trainers, disks without space, parts that break off. Each is
refused with its reason, and the old version is served on."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from fleet_cases import connect, push, replicas, roll
from scripted_sidecar import KeepingEngine, serving
from served_sidecars import make_tasks, make_tokenizer

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.engines.scripted import ScriptedEngine
from rollout_sidecar.protocol import WeightsManifest, content_hash
from tooljax.weights.payload import full_payload
from tooljax.weights.push import PushError, PushReport, WeightSender
from tooljax.weights.stopwatch import Stopwatch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("rollout_sidecar.connection.RETRIES", 1)


def weights(seed: int) -> dict[str, jnp.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=(32, 32)), jnp.bfloat16) for name in "abcd"}


def bytes_of(arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


# --- two trainers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", range(4))
@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_of_two_trainers_that_push_at_once_one_wins_and_the_other_is_told(
    tokenizer, mode, lead
):
    """The second one begins when the first has sent `lead` of its parts."""
    engine = KeepingEngine(tokenizer)
    async with (
        serving(engine, tokenizer) as url,
        SidecarClient(url) as mine,
        SidecarClient(url) as theirs,
    ):
        first = [WeightSender([client], mode=mode, part_bytes=512) for client in (mine, theirs)]
        await first[0].push(weights(0).items(), version=1, timeout_s=30.0)
        started, put_part = asyncio.Event(), 0
        call = mine._call

        async def counted(method, path, **kwargs):
            nonlocal put_part
            answer = await call(method, path, **kwargs)
            put_part += method == "PUT"
            if put_part >= lead:
                started.set()
                await asyncio.sleep(0)
            return answer

        mine._call = counted

        async def second():
            await started.wait()
            return await first[1].push(weights(2).items(), version=2, timeout_s=30.0)

        results = await asyncio.gather(
            first[0].push(weights(1).items(), version=2, timeout_s=30.0),
            second(),
            return_exceptions=True,
        )
        done = [i for i, result in enumerate(results) if isinstance(result, PushReport)]
        refusals = [result for result in results if isinstance(result, PushError)]
        assert (len(done), len(refusals)) == (1, 1), results
        told = str(refusals[0])
        assert "only one trainer may push" in told or "is being served with other content" in told
        assert engine.weights == bytes_of(weights(1 + done[0]))
        winner = results[done[0]]
        assert isinstance(winner, PushReport)
        assert (await mine.info()).content_hash == winner.content_hash
        served = await mine.served_weights()
        held = {name: xxhash.xxh3_128_hexdigest(data) for name, data in engine.weights.items()}
        assert (served.version, served.hashes) == (2, held)


# --- no space -----------------------------------------------------------------------------------------------------


class OnDisk(ScriptedEngine):
    """Takes weights by way of a file."""

    file = Path("/dev/null")
    weights: dict[str, bytes]

    async def load_weights(self, tensors, policy_version, changed=None):
        with self.file.open("wb") as out:
            for tensor in tensors.values():
                out.write(tensor.data)
        self.weights = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        await super().load_weights(tensors, policy_version, changed)


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_sidecar_whose_disk_is_full_keeps_what_it_has_and_is_not_used_until_it_has_the_new(
    tokenizer, mode
):
    with (
        replicas(tokenizer, ["#### 1"], count=2, engine=OnDisk, delays=[0.05] * 2) as served,
        connect(served) as sidecars,
    ):
        full = served[1]
        push(sidecars, 0, mode)
        before = full.engine.weights  # type: ignore[attr-defined]
        hash_before = full.sidecar.weights.content_hash
        full.engine.file = Path("/dev/full")  # type: ignore[attr-defined]
        assert push(sidecars, 1, mode).version == 2
        assert [r.live for r in sidecars.fleet.replicas] == [True, False]
        assert "No space left on device" in sidecars.fleet.replicas[1].why
        groups = roll(sidecars, make_tasks(4), samples=1, step=1)
        assert {s.policy_version for g in groups for t in g for s in t.version_spans} == {2}
        assert not full.engine.requests
        # The old version, whole, for whoever asks for it.
        assert (full.engine.policy_version, full.engine.weights) == (1, before)  # type: ignore
        assert full.do(ready_with(full.url, 1)) == (True, hash_before)
        full.engine.file = Path("/dev/null")  # type: ignore[attr-defined]
        assert push(sidecars, 2, mode).version == 3
        assert [r.live for r in sidecars.fleet.replicas] == [True, True]
        assert full.engine.weights == served[0].engine.weights  # type: ignore[attr-defined]


async def ready_with(url: str, version: int) -> tuple[bool, str]:
    async with SidecarClient(url) as client:
        return await client.ready(version), (await client.info()).content_hash


def test_without_another_sidecar_a_full_disk_ends_the_push_with_its_reason(tokenizer):
    with (
        replicas(tokenizer, ["#### 1"], count=1, engine=OnDisk) as served,
        connect(served, down_timeout_s=0.3) as sidecars,
    ):
        push(sidecars, 0, "delta")
        before = served[0].engine.weights  # type: ignore[attr-defined]
        served[0].engine.file = Path("/dev/full")  # type: ignore[attr-defined]
        with pytest.raises(PushError, match="No space left on device"):
            push(sidecars, 1, "delta")
        assert (served[0].engine.policy_version, served[0].engine.weights) == (1, before)  # type: ignore
        # However long ago it was left out: who waits from now on waits its own time.
        groups = roll(sidecars, make_tasks(1), samples=1)
        assert {s.policy_version for g in groups for t in g for s in t.version_spans} == {1}


# --- truncated parts ----------------------------------------------------------------------------------------------


async def test_a_part_that_breaks_off_within_its_body_counts_for_nothing(tokenizer):
    engine = KeepingEngine(tokenizer)
    async with serving(engine, tokenizer) as url, SidecarClient(url) as client:
        await WeightSender([client], mode="full", part_bytes=2048).push(
            weights(0).items(), version=1, timeout_s=30.0
        )
        payload = full_payload(weights(1).items(), keep_arrays=False, watch=Stopwatch())
        manifest = WeightsManifest(
            push_id="p", tensors=payload.entries, payload_bytes=payload.nbytes, part_bytes=4096
        )
        sent = threading.Event()

        def read(start: int, nbytes: int):
            sent.set()
            return payload.read(start, nbytes)

        pushing = asyncio.ensure_future(client.push_weights(2, manifest, read))
        await asyncio.to_thread(sent.wait, 10)
        host, port = url.removeprefix("http://").split(":")
        for kept in (0, 1, 4095):
            _, writer = await asyncio.open_connection(host, int(port))
            head = "PUT /v1/weights/2/parts/1?push_id=p HTTP/1.1\r\nHost: x\r\nContent-Length: 4096"
            writer.write(f"{head}\r\n\r\n".encode() + b"\xff" * kept)
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()
        with suppress(
            Exception
        ):  # the stray parts may come after its own: then it must begin again
            await pushing
        committed = await client.push_weights(2, manifest, payload.read)
        assert committed.content_hash == content_hash(payload.entries)
        assert engine.weights == bytes_of(weights(1))
