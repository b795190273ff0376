"""The whole loop with a real SGLang: the sidecar as a process, rollouts with tools over HTTP, pushes by the trainer's
sender, and every way in which it ends.

`calling_model.py` makes a model that calls the calculator. Pain points 9, 21 and 25 have their tests here.
"""

import asyncio
import os
import signal
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calling_model import ANSWERS, CALL, MESSAGES, STOPS, CallingModel, make_calling_model
from served_process import ServedProcess
from sglang_cases import assert_log_probs_agree, real, reference_log_probs, tensors_of

from rollout_sidecar.client import SidecarClient
from rollout_sidecar.protocol import (
    Limits,
    RolloutRequest,
    RolloutSpec,
    SamplingParams,
    Task,
    Trajectory,
)
from tooljax.weights.push import WeightSender

pytestmark = [
    real,
    pytest.mark.timeout(600),
    # SGLang's own dependencies warn.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def calling(tmp_path_factory) -> CallingModel:
    return make_calling_model(tmp_path_factory.mktemp("calling"))


@pytest.fixture(scope="module")
def retrained(tmp_path_factory) -> CallingModel:
    """What a push brings."""
    return make_calling_model(tmp_path_factory.mktemp("retrained"), seed=1)


@pytest.fixture(scope="module")
def served(calling, tmp_path_factory):
    sidecar = ServedProcess(calling.folder, tmp_path_factory.mktemp("served"))
    yield sidecar.wait_until_ready()
    sidecar.kill()


async def play(
    sidecar: ServedProcess, name: str, count: int, *, temperature: float = 1.0, **limits: int
) -> list[Trajectory]:
    bounds = {"max_turns": 4, "max_tokens_per_turn": 24, "max_trajectory_tokens": 512} | limits
    request = RolloutRequest(
        request_id=name,
        tasks=[
            Task(
                task_id="t",
                messages=MESSAGES,
                data_source="openai/gsm8k",
                ground_truth="19",
            )
        ],
        rollouts=[RolloutSpec(task_index=0, sample_index=i, seed=i) for i in range(count)],
        sampling=SamplingParams(temperature=temperature),
        limits=Limits(**bounds),
    )
    async with SidecarClient(sidecar.url) as client:
        return [trajectory async for trajectory in client.rollouts(request)]


def assert_sampled_by(trajectory: Trajectory, model, *, temperature: float = 1.0) -> None:
    """Every sampled token has the log-prob that transformers gives it in the whole conversation."""
    ids = trajectory.token_ids
    expected = [0.0, *reference_log_probs(model, ids[:1], ids[1:], temperature)]
    mask = np.array(trajectory.loss_mask)
    assert_log_probs_agree(
        np.array(trajectory.rollout_log_probs)[mask].tolist(), np.array(expected)[mask].tolist()
    )
    assert not np.array(trajectory.rollout_log_probs)[~mask].any()


def jax_tensors(model) -> list[tuple[str, jax.Array]]:
    """What a trainer has. The weights are bfloat16 numbers already."""
    return [(name, jnp.asarray(each, jnp.bfloat16)) for name, each in tensors_of(model).items()]


async def push(sidecar: ServedProcess, model, *, version: int) -> None:
    async with SidecarClient(sidecar.url) as client:
        sender = WeightSender([client], mode="full", part_bytes=2**16)
        await sender.push(jax_tensors(model), version=version, timeout_s=60)


async def test_whole_conversations_are_token_exact(served, calling):
    """Pain point 9: the engine's log-probs are those of the tempered distribution that was sampled from."""
    trajectories = await play(served, "conversations", 64, temperature=0.7)
    assert len(trajectories) == 64
    called = [trajectory for trajectory in trajectories if len(trajectory.turns) > 1]
    assert len(called) > 20
    for trajectory in trajectories:
        assert trajectory.status in ("completed", "max_turns", "max_tokens"), trajectory.error
        assert_sampled_by(trajectory, calling.model, temperature=0.7)
        sampled = [i for turn in trajectory.turns for i in range(turn.start, turn.end)]
        assert sampled == [i for i, mine in enumerate(trajectory.loss_mask) if mine]
    for trajectory in called:
        for turn in trajectory.turns[:-1]:
            assert trajectory.token_ids[turn.start : turn.end] == [
                calling.ids[CALL],
                calling.ids[STOPS["template"]],
            ]
            assert [(call.status, call.result) for call in turn.calls] == [("ok", "19")]


async def test_every_source_of_stop_ids_ends_a_turn(served, calling):
    """Pain point 25: the ids of template, tokenizer, config and generation_config, each there exactly once."""
    trajectories = await play(served, "stops", 96)
    stops = {calling.ids[text]: source for source, text in STOPS.items()}
    seen = set()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            tokens = trajectory.token_ids[turn.start : turn.end]
            found = [token for token in tokens if token in stops]
            assert found == ([tokens[-1]] if turn.finish == "stop" else [])
            answer = [token for token in tokens if token in {calling.ids[each] for each in ANSWERS}]
            if answer and found:
                seen.add(stops[found[0]])
    assert seen == set(STOPS)


async def test_a_turn_prefills_only_what_the_tools_said(served):
    for trajectory in await play(served, "prefixes", 16):
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            # All but the last sampled token, whose keys and values are made with the next one's.
            assert turn.cached_tokens >= before.end - 1


async def test_metrics_hold_sglangs_own(served):
    text = served.get("/metrics")
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[:1] != "#"}
    assert {"tooljax_sidecar_turns_total", "tooljax_sidecar_rollouts_total"} <= names
    assert {"sglang:generation_tokens_total", "sglang:num_running_reqs"} <= names
    turns = sum(
        float(line.rsplit(" ")[-1])
        for line in text.splitlines()
        if line.startswith("sglang:num_requests_total")
    )
    assert turns >= 176  # of the conversations above, at least one a trajectory


async def test_an_aborted_request_ends_at_once_and_leaves_the_engine_free(served):
    # At this temperature every token is as likely as any other: turns are long.
    playing = asyncio.create_task(
        play(served, "abort", 12, temperature=50, max_tokens_per_turn=400)
    )
    await asyncio.sleep(0.5)
    async with SidecarClient(served.url) as client:
        begun = time.monotonic()
        await client.abort("abort")
        assert time.monotonic() - begun < 5
    playing.cancel()
    text = served.get("/metrics")
    assert "tooljax_sidecar_running_rollouts 0" in text
    assert len(await play(served, "after_abort", 4)) == 4


async def test_pushed_weights_are_those_of_a_cold_engine(
    served, calling, retrained, tmp_path_factory
):
    """Pain point 21: after an update, full or delta, nothing of the old version is left; also of known prompts."""
    [before] = await play(served, "before", 1, temperature=0.0)
    assert_sampled_by(before, calling.model)
    half_way = replace(retrained, model=_between(calling.model, retrained.model))
    async with SidecarClient(served.url) as client:
        sender = WeightSender([client], mode="delta", part_bytes=2**16)
        full = await sender.push(jax_tensors(half_way.model), version=1, timeout_s=60)
        [halved] = await play(served, "half_way", 1, temperature=0.0)
        delta = await sender.push(jax_tensors(retrained.model), version=2, timeout_s=60)
    assert full.bytes == full.full_bytes
    assert 0 < delta.bytes < 0.8 * delta.full_bytes
    assert_sampled_by(halved, half_way.model)
    [after] = await play(served, "after", 1, temperature=0.0)
    assert_sampled_by(after, retrained.model)
    versions = [
        trajectory.version_spans[0].policy_version for trajectory in (before, halved, after)
    ]
    assert versions == [0, 1, 2]
    first = before.prompt_tokens
    assert abs(before.rollout_log_probs[first] - after.rollout_log_probs[first]) > 0.01

    cold_sidecar = ServedProcess(retrained.folder, tmp_path_factory.mktemp("cold"))
    try:
        cold_sidecar.wait_until_ready()
        [cold] = await play(cold_sidecar, "cold", 1, temperature=0.0)
        assert cold.token_ids == after.token_ids
        np.testing.assert_allclose(cold.rollout_log_probs, after.rollout_log_probs, atol=1e-5)
        _kill_its_scheduler(cold_sidecar)
    finally:
        cold_sidecar.kill()


def _between(first, second):
    """The second model with the first one's head: a delta to the second changes the head alone."""
    import copy

    made = copy.deepcopy(second)
    made.lm_head.weight.data.copy_(first.lm_head.weight)
    return made


def _kill_its_scheduler(sidecar: ServedProcess) -> None:
    """Whoever kills a scheduler ends the sidecar: with a word why, an exit code, and nothing left."""
    family = sidecar.family()
    scheduler = max(pid for pid, command in family.items() if "sglang::scheduler" in command)
    os.kill(scheduler, signal.SIGKILL)
    assert sidecar.wait_until_gone(family, timeout_s=20) == 1
    assert f"(process {scheduler}) with exit code -9; the sidecar ends" in sidecar.log


async def test_sigterm_ends_everything_while_rollouts_run(served):
    playing = asyncio.create_task(
        play(served, "sigterm", 8, temperature=50, max_tokens_per_turn=400)
    )
    await asyncio.sleep(0.5)
    assert await asyncio.to_thread(served.end) == 0
    playing.cancel()
    assert "Traceback" not in served.log.partition("stopping")[2]


def test_sigterm_while_it_starts_ends_everything(calling, tmp_path):
    sidecar = ServedProcess(calling.folder, tmp_path)
    try:
        sidecar.wait_for_log("Signal handler is not added", 120)  # its processes come next
        time.sleep(1)
        assert sidecar.end() == 0
    finally:
        sidecar.kill()


def test_a_start_that_fails_says_why(calling, tmp_path):
    sidecar = ServedProcess(calling.folder, tmp_path, context_length=10**6)
    try:
        assert sidecar.wait_until_gone({}, timeout_s=120) == 1
    finally:
        sidecar.kill()
    assert "rollout_sidecar: SGLang did not start: " in sidecar.log
    assert "context_length" in sidecar.log.splitlines()[-1]


async def test_two_engines_in_one_sidecar(calling, retrained, tmp_path):
    import torch

    if torch.cuda.device_count() == 1:
        pytest.skip("--dp 2 needs two GPUs, or none")
    # SGLang takes the number of a CPU engine for that of a NUMA node.
    where = {} if torch.cuda.is_available() else {"base_gpu_id": 0}
    sidecar = ServedProcess(calling.folder, tmp_path, dp=2, **where)
    try:
        sidecar.wait_until_ready()
        for trajectory in await play(sidecar, "both", 32):
            assert_sampled_by(trajectory, calling.model)
            for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
                assert turn.cached_tokens >= before.end - 1
        await push(sidecar, retrained.model, version=1)
        for trajectory in await play(sidecar, "both_again", 32):
            assert {span.policy_version for span in trajectory.version_spans} == {1}
            assert_sampled_by(trajectory, retrained.model)
        counted = [
            line
            for line in sidecar.get("/metrics").splitlines()
            if line.startswith("sglang:num_requests_total")
        ]
        for replica in "01":
            [line] = [line for line in counted if f'replica="{replica}"' in line]
            assert float(line.rsplit(" ")[-1]) >= 32
        _kill_its_scheduler(sidecar)
    finally:
        sidecar.kill()
