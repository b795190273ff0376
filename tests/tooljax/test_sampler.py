"""Generation with the KV cache: right numbers, and the same bits however trajectories are scheduled."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_decoder import random_decoder

# Odd sizes, so that no row or column lies where vectors of 8 or 16 begin.
from sampler_cases import (
    CFG,
    LIMIT,
    SLOTS,
    finish,
    make_sampler,
    prompt,
    trainer_log_probs,
    trainer_logits,
    turn,
)

from tooljax.model import hf
from tooljax.model.sampler import Sampler, unstack
from tooljax.model.sampler_steps import prefill


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(temperature):
    sampler, decoder = make_sampler(), random_decoder(CFG)
    # 1 token: nothing to prefill. 125: decoding crosses into the second chunk of keys. 280: all chunk sizes.
    contexts = {str(n): prompt(n) for n in (1, 2, 17, 125, 280)}
    ended = finish(sampler, *(turn(n, c, temperature=temperature) for n, c in contexts.items()))
    for name, context in contexts.items():
        expected = trainer_log_probs(decoder, context, ended[name].token_ids, temperature)
        # float32, summed in another order than the trainer's: 4e-6 measured
        np.testing.assert_allclose(ended[name].log_probs, expected, rtol=0, atol=1e-4)


def test_later_turns_read_only_what_is_new():
    sampler, decoder = make_sampler(), random_decoder(CFG)
    context = prompt(40)
    first = finish(sampler, turn("a", context))["a"]
    assert first.cached_tokens == 0
    context = [*context, *first.token_ids, *prompt(9)]
    second = finish(sampler, turn("a", context, seed=8))["a"]
    assert second.cached_tokens == 40 + 12 - 1  # the last sampled token has not been fed
    expected = trainer_log_probs(decoder, context, second.token_ids)
    np.testing.assert_allclose(second.log_probs, expected, rtol=0, atol=1e-4)


def test_a_context_that_parts_from_the_last_one_is_read_from_there():
    sampler, decoder = make_sampler(), random_decoder(CFG)
    context = prompt(60)
    finish(sampler, turn("a", context))
    changed = [*context[:33], (context[33] + 1) % CFG.vocab, *context[34:]]
    ended = finish(sampler, turn("a", changed))["a"]
    assert ended.cached_tokens == 33
    expected = trainer_log_probs(decoder, changed, ended.token_ids)
    np.testing.assert_allclose(ended.log_probs, expected, rtol=0, atol=1e-4)


def test_greedy_takes_the_trainers_likeliest_token():
    context = prompt(20)
    ended = finish(make_sampler(), turn("a", context, temperature=0.0))["a"]
    logits = trainer_logits(random_decoder(CFG), [*context, *ended.token_ids])
    np.testing.assert_array_equal(ended.token_ids, logits.argmax(axis=-1)[19:-1])


def test_bfloat16_log_probs_are_near_the_trainers():
    cfg = replace(CFG, dtype="bfloat16")
    decoder = random_decoder(cfg)
    sampler = Sampler(cfg, unstack(decoder), slots=SLOTS, max_model_tokens=LIMIT)
    context = prompt(40)
    ended = finish(sampler, turn("a", context))["a"]
    expected = trainer_log_probs(decoder, context, ended.token_ids)
    # 8 bits of every activation, and attention weights rounded before, not after, their sum is divided out
    np.testing.assert_allclose(ended.log_probs, expected, rtol=0, atol=0.15)


@pytest.mark.skipif("TOOLJAX_TEST_MODEL" not in os.environ, reason="needs a SmolLM2 folder")
@pytest.mark.timeout(300)
def test_log_probs_are_the_trainers_on_a_real_model():
    decoder = hf.load(os.environ["TOOLJAX_TEST_MODEL"], "float32")
    sampler = Sampler(decoder.cfg, unstack(decoder), slots=4, max_model_tokens=256)
    contexts = {str(n): list(range(100, 100 + n)) for n in (5, 30, 150)}
    for temperature in (1.0, 0.7):
        ended = finish(sampler, *(turn(n, c, temperature=temperature) for n, c in contexts.items()))
        for name, context in contexts.items():
            expected = trainer_log_probs(decoder, context, ended[name].token_ids, temperature)
            np.testing.assert_allclose(ended[name].log_probs, expected, rtol=0, atol=1e-4)


# --- the same bits ----------------------------------------------------------------------------------------------------


def play(sampler: Sampler, order, samples: int = 12) -> dict:
    """Two turns of each trajectory, some of which share prompts; the next turn follows as soon as one ends."""
    options = [
        {"temperature": 1.0},
        {"temperature": 0.7, "stop_ids": frozenset(range(12))},
        {"temperature": 0.0},
        {"top_k": 9, "top_p": 0.9},
    ]
    record = {}
    for i in order:
        tokens = prompt((30, 140, 200)[i % 3])
        sampler.submit(turn(str(i), tokens, seed=2**40 + i, max_tokens=9 + i, **options[i % 4]))
    while sampler.busy:
        for ended in sampler.step():
            name = ended.trajectory_id
            turns = record.setdefault(name, [])
            turns.append((ended.token_ids, ended.log_probs, ended.finish, ended.cached_tokens))
            if len(turns) == 2:
                sampler.release(name)
            else:
                i = int(name)
                tokens = [*prompt((30, 140, 200)[i % 3]), *ended.token_ids, *prompt(5 + i)]
                sampler.submit(turn(name, tokens, seed=i, **options[i % 4]))
    return record


@pytest.fixture(scope="module")
def played() -> dict:
    return play(make_sampler(), range(12))


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, range(11, -1, -1)),
        ({}, [3, 0, 8, 5, 11, 2, 9, 6, 1, 4, 10, 7]),
        ({"block_steps": 1}, range(12)),
        ({"block_steps": 16}, range(11, -1, -1)),
        ({"share_prompts": False}, range(12)),
    ],
)
def test_scheduling_changes_no_bit(played, options, order):
    assert play(make_sampler(**options), order) == played


def test_other_trajectories_change_no_bit(played):
    for name in ("2", "7", "11"):
        assert play(make_sampler(), [int(name)])[name] == played[name]


def test_every_slot_gives_the_same_bits():
    alone = finish(make_sampler(), turn("a", prompt(50)))["a"]
    for slot in range(SLOTS):
        sampler = make_sampler()
        finish(sampler, *(turn(str(i), prompt(9, i), max_tokens=1 + i) for i in range(slot)))
        ended = finish(sampler, turn("a", prompt(50)))["a"]
        assert (ended.token_ids, ended.log_probs) == (alone.token_ids, alone.log_probs)


def test_a_used_slot_gives_the_same_bits():
    sampler = make_sampler(slots=1)
    first = finish(sampler, turn("a", prompt(50)))["a"]
    sampler.release("a")
    finish(sampler, turn("b", prompt(280), max_tokens=19))
    sampler.release("b")
    again = finish(sampler, turn("c", prompt(50)))["c"]
    assert (again.token_ids, again.log_probs) == (first.token_ids, first.log_probs)


def test_another_process_gives_the_same_bits(played):
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"
        "import test_sampler as t\n"
        "print(t.fingerprint(t.play(t.make_sampler(), range(11, -1, -1))))"
    )
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", script, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == fingerprint(played)


def fingerprint(record: dict) -> str:
    return hashlib.sha256(repr(sorted(record.items())).encode()).hexdigest()


def test_a_shared_prompt_is_read_once(monkeypatch):
    read = []

    def counting(cfg, weights, cache, chunks):
        read.append(int(chunks.count) * chunks.tokens.shape[1])
        return prefill(cfg, weights, cache, chunks)

    sampler = make_sampler()
    monkeypatch.setattr("tooljax.model.sampler.prefill", counting)
    finish(sampler, *(turn(str(i), prompt(65), seed=i) for i in range(SLOTS)))
    assert sum(read) == 64  # 64 of 65 tokens, once
    sampler.release("0")
    finish(sampler, turn("late", prompt(65)))
    assert sum(read) == 64
    sampler.replace_weights(unstack(random_decoder(CFG, 1)))
    finish(sampler, turn("late", prompt(65)))
    assert sum(read) == 128


# --- ends, limits, slots ----------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_turn_and_is_its_last_token():
    free = finish(make_sampler(), turn("a", prompt(30)))["a"]
    assert free.finish == "length"
    assert len(free.token_ids) == 12
    stop = free.token_ids[5]
    end = free.token_ids.index(stop) + 1
    for block_steps in (1, 4, 8):
        sampler = make_sampler(block_steps=block_steps)
        ended = finish(sampler, turn("a", prompt(30), stop_ids=frozenset({stop, 100})))["a"]
        assert ended.finish == "stop"
        assert ended.token_ids == free.token_ids[:end]
        assert ended.log_probs == free.log_probs[:end]


def test_a_turn_ends_where_the_cache_does():
    ended = finish(make_sampler(), turn("a", prompt(LIMIT - 3)))["a"]
    assert (ended.finish, len(ended.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": prompt(LIMIT)}, "context of 300 tokens: the engine takes 1 to 299"),
        ({"tokens": []}, "context of 0 tokens"),
        ({"tokens": [3, 101]}, "token ids 3 to 101 are not all in the vocabulary of 101"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"stop_ids": frozenset(range(17))}, "17 stop ids; the embedded engine takes up to 16"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be at least 0"),
    ],
)
def test_a_turn_that_cannot_be_run_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler().submit(turn("a", **{"tokens": prompt(5), **options}))


def test_one_turn_a_trajectory_at_a_time():
    sampler = make_sampler()
    sampler.submit(turn("a", prompt(5)))
    with pytest.raises(ValueError, match="'a' is already generating a turn"):
        sampler.submit(turn("a", prompt(5)))


def test_slots_are_given_in_order_and_kept_until_release():
    sampler = make_sampler(slots=1)
    assert set(finish(sampler, *(turn(name, prompt(5)) for name in "abc"))) == {"a"}
    assert set(finish(sampler, turn("a", prompt(9)))) == {"a"}  # b and c wait, a has its slot
    sampler.release("a")
    assert set(finish(sampler)) == {"b"}
    sampler.release("unknown")
    sampler.release("b")
    assert set(finish(sampler)) == {"c"}


def test_abort_returns_what_there_is():
    whole = finish(make_sampler(slots=1), turn("a", prompt(30), max_tokens=30))["a"]
    sampler = make_sampler(slots=1)
    sampler.submit(turn("a", prompt(30), max_tokens=30))
    sampler.submit(turn("b", prompt(30)))
    sampler.step()
    waiting, running = sampler.abort("b"), sampler.abort("a")
    assert waiting is not None
    assert running is not None
    assert (waiting.finish, waiting.token_ids) == ("aborted", [])
    assert (running.finish, running.token_ids) == ("aborted", whole.token_ids[:8])
    assert running.log_probs == whole.log_probs[:8]
    assert sampler.abort("a") is None
    assert not sampler.busy


def test_while_paused_nothing_starts():
    sampler = make_sampler()
    sampler.submit(turn("a", prompt(5)))
    sampler.step()
    sampler.paused = True
    ended = finish(sampler, turn("b", prompt(5)))
    assert set(ended) == {"a"}
    sampler.paused = False
    assert set(finish(sampler)) == {"b"}


# --- weights and compilation ------------------------------------------------------------------------------------------


def test_new_weights_leave_nothing_of_the_old():
    sampler = make_sampler(0)
    finish(sampler, turn("a", prompt(50)))
    sampler.replace_weights(unstack(random_decoder(CFG, 1)))
    ended = finish(sampler, turn("a", prompt(50)))["a"]
    fresh = finish(make_sampler(1), turn("a", prompt(50)))["a"]
    assert ended == fresh


def test_broken_weights_do_not_outlive_their_replacement():
    good = unstack(random_decoder(CFG))
    sampler = make_sampler()
    before = finish(sampler, turn("a", prompt(50)))["a"]
    sampler.replace_weights(jax.tree.map(lambda w: w * jnp.nan, good))
    broken = finish(sampler, *(turn(str(i), prompt(290), max_tokens=9) for i in range(4)))["0"]
    assert np.isnan(broken.log_probs).all()
    sampler.replace_weights(good)
    for name in ("a", "0", "1", "2", "3"):
        after = finish(sampler, turn(name, prompt(50)))[name]
        assert (after.token_ids, after.log_probs) == (before.token_ids, before.log_probs)


def test_weights_of_another_shape_are_refused():
    sampler = make_sampler()
    other = unstack(random_decoder(replace(CFG, ffw=60)))
    with pytest.raises(ValueError, match="differ from the model in a name, shape or dtype"):
        sampler.replace_weights(other)


def test_weights_are_not_replaced_under_a_running_turn():
    sampler = make_sampler()
    sampler.submit(turn("a", prompt(5), max_tokens=20))
    sampler.step()
    with pytest.raises(RuntimeError, match="1 turns are running; pause, and step until none is"):
        sampler.replace_weights(unstack(random_decoder(CFG)))


def test_nothing_is_compiled_after_warm_up():
    compiled = []

    def listen(event: str, duration_secs: float, **_) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    # A shape that no other test uses. The weights are made before the count starts.
    replacement = unstack(random_decoder(CFG, 1))
    sampler = make_sampler(slots=2)
    assert compiled
    after_warm_up = sampler.compilations
    compiled.clear()
    play(sampler, range(6))
    sampler.replace_weights(replacement)
    play(sampler, range(6))
    assert compiled == []
    assert sampler.compilations == after_warm_up


def test_block_steps_have_a_bound():
    with pytest.raises(ValueError, match="block_steps=17 must be from 1 to 16"):
        make_sampler(block_steps=17)
