"""Sidecars killed and started again at random moments of pushes and rollouts: no trajectory is lost or comes twice,
every token has the version that was asked for, and nobody serves a mixture of two versions."""

import random
import threading

import jax.numpy as jnp
import pytest
from fleet_cases import connect, essences, replicas, roll, several_turns
from served_sidecars import make_tasks, make_tokenizer

from rollout_sidecar.engines.scripted import ScriptedEngine
from tooljax.config.schema import WeightsConfig

TASKS, SAMPLES, STEPS = 3, 2, 12


class Keeping(ScriptedEngine):
    """Keeps the bytes of its weights."""

    weights: dict[str, bytes]

    async def load_weights(self, tensors, policy_version, changed=None):
        self.weights = {name: bytes(tensor.data) for name, tensor in tensors.items()}
        await super().load_weights(tensors, policy_version, changed)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def weights(step: int) -> dict[str, jnp.ndarray]:
    """Those after so many steps; few elements change from step to step."""
    a = jnp.zeros((64, 64), jnp.bfloat16).at[step % 64].set(step + 1)
    return {"a": a, "b": jnp.full(8, step, jnp.float32)}


@pytest.mark.parametrize("count", [1, 3])
def test_kills_at_random_moments(tokenizer, count):
    script = several_turns(TASKS, SAMPLES)
    with replicas(tokenizer, script, count=1) as served, connect(served) as sidecars:
        undisturbed = essences(roll(sidecars, make_tasks(TASKS), samples=SAMPLES))
    draw = random.Random(count)
    kills = 0
    with (
        replicas(tokenizer, script, count=count, engine=Keeping, delays=[0.01] * count) as served,
        connect(served, period_s=0.05) as sidecars,
    ):
        lock = threading.Lock()

        def kill_and_start(victim) -> None:
            with lock:  # one at a time: it starts as fast as it is killed
                victim.do(_kill(victim))
                victim.start()

        for step in range(STEPS):
            timers = [
                threading.Timer(draw.uniform(0, 0.15), kill_and_start, [draw.choice(served)])
                for _ in range(draw.randint(1, 4))
            ]
            kills += len(timers)
            for timer in timers:
                timer.start()
            seen = []
            sidecars.push(
                weights(step).items(),
                step=step,
                weights=WeightsConfig(part_bytes=1024, mode="delta", timeout_s=10.0),
            )
            groups = roll(
                sidecars,
                make_tasks(TASKS),
                samples=SAMPLES,
                step=step,
                on_progress=lambda *n, seen=seen: seen.append(n),
            )
            for timer in timers:
                timer.join()
            assert seen == [(n, TASKS * SAMPLES) for n in range(1, TASKS * SAMPLES + 1)]
            assert [[t.token_ids for t in g] for g in groups] == [
                [t["token_ids"] for t in g] for g in undisturbed
            ]
            for trajectory in (t for g in groups for t in g):
                spans = trajectory.version_spans
                assert {span.policy_version for span in spans} == {step + 1}
                assert sum(s.end - s.start for s in spans) == sum(trajectory.loss_mask)
            expected = {name: array.tobytes() for name, array in weights(step).items()}
            for one in served:
                if one.engine.policy_version == step + 1:
                    assert one.engine.weights == expected  # type: ignore[attr-defined]
    assert kills > 1.5 * STEPS


async def _kill(victim) -> None:
    victim.kill_here()
