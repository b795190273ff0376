"""Prompts laid out once for the samples of a group: the loss and gradients of the plain layout, and fewer tokens; and
what docs/shared_prompts.md shows."""

import re
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from docs_pages import blocks, read, wrong_names
from random_decoder import random_decoder
from test_update_mesh import CONFIG as MESH_CONFIG
from training_batch_cases import config, trajectory
from update_cases import CONFIG, gradient, model, new_updater

from tooljax.batch import Batch, PackedBatch, PackItem, packed, unpack, unpack_field
from tooljax.config import load_config
from tooljax.packing_shared import PAYS
from tooljax.sharding import make_layout
from tooljax.training_batch import make_batch

pytestmark = pytest.mark.usefixtures("quick_compilations")


def sample(prompt: list[int], own: int, seed: int, **changes) -> PackItem:
    """A prompt and `own` tokens behind it, of which two of three are sampled; none of an own of 0."""
    rng = np.random.default_rng(seed)
    ids = [*prompt, *rng.integers(0, CONFIG.vocab, own).tolist()]
    mask = [False] * len(prompt) + [i % 3 != 2 for i in range(own)]
    rollout = np.where(mask, -rng.uniform(1, 4, len(ids)), 0.0).tolist()
    item = PackItem(ids, mask, float(rng.normal()), rollout, prompt_tokens=len(prompt))
    return replace(item, **changes)


@cache
def items() -> tuple[PackItem, ...]:
    """A group of four samples, one of them empty and one not trained; of one sample; of three; and two that share
    nothing: prompts of one token, and a stream that does not say how long its prompt is."""
    rng = np.random.default_rng(7)
    first, second, third = (rng.integers(0, CONFIG.vocab, n).tolist() for n in (9, 5, 13))
    return (
        sample(first, 4, 1),
        sample(second, 6, 2),
        sample(first, 0, 3),
        sample(first, 7, 4),
        sample(first, 3, 5, trained=False),
        sample(third, 1, 6),
        sample(third, 8, 7),
        sample([3], 5, 8),
        sample(third, 2, 9),
        sample([3], 6, 10),
        sample(third, 5, 11, prompt_tokens=0),
    )


def batches(*, rows: int = 1, lengths=(32,), mixed: bool = False) -> tuple[Batch, Batch]:
    """Shared and plain."""
    shared, plain = (
        packed(
            items(),
            row_lengths=lengths,
            rows_per_microbatch=rows,
            mixed_lengths=mixed,
            shards=rows,
            shared_prompts=on,
        )
        for on in (True, False)
    )
    assert all(part.trunk_ids is not None for part in shared.groups)
    assert all(part.trunk_ids is None for part in plain.groups)
    return shared, plain


def test_a_trunk_and_its_branches_by_hand():
    prompt = [11, 12, 13]
    group = [sample(prompt, own, own) for own in (2, 1, 0)]
    made = packed(
        group, row_lengths=(10,), rows_per_microbatch=1, mixed_lengths=False, shared_prompts=True
    )
    (part,) = made.groups
    assert part.trunk_ids is not None
    assert part.sequence_ids is not None
    a, b = group[0].token_ids[3:], group[1].token_ids[3:]
    # The trunk is all of the prompt but its last token, which each branch begins with.
    assert part.tokens.tolist() == [[11, 12, 13, *a, 13, *b, 13, 0, 0]]
    assert part.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 2, 0, 0]]
    assert part.segment_ids.tolist() == [[1, 1, 2, 2, 2, 3, 3, 4, 0, 0]]
    assert part.trunk_ids.tolist() == [[1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert np.flatnonzero(part.loss_mask[0]).tolist() == [3, 4, 6]
    assert part.sequence_ids.tolist() == [[-1, -1, 0, 0, 0, 1, 1, 2, -1, -1]]
    assert part.saved_tokens == 4
    for found, item in zip(unpack(part.tokens, part), group, strict=True):
        assert found.tolist() == item.token_ids


@pytest.mark.parametrize("mixed", [False, True])
def test_the_update_is_that_of_the_plain_layout(mixed):
    _, params = model()
    # The longest trajectory takes 21 tokens; rows of 24 hold no bundle of all of a group.
    shared, plain = batches(lengths=(24, 48) if mixed else (24,), mixed=mixed)
    assert isinstance(shared, PackedBatch) == mixed
    assert shared.loss_tokens == plain.loss_tokens
    assert shared.saved_tokens > 0 == plain.saved_tokens
    updater = new_updater(kl_coef=0.5)
    rng = np.random.default_rng(1)
    noise = [rng.uniform(-4, -2, len(item.token_ids)).astype(np.float32) for item in items()]
    found = []
    for batch in (shared, plain):
        now = updater.log_probs(params, batch)
        ready = batch.with_log_probs(old=now, ref=_in_rows(noise, batch))
        state, metrics = updater.update(updater.init(params), ready)
        found.append((unpack(now, batch), metrics, gradient(updater, params, ready)))
    (log_probs, metrics, gradients), expected = found
    for mine, theirs in zip(log_probs, expected[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
    for name, wanted in expected[2].items():
        largest = np.abs(wanted).max()
        assert largest > 1e-4, name
        np.testing.assert_allclose(gradients[name], wanted, rtol=1e-5, atol=1e-5 * largest)


def _in_rows(values, batch: Batch):
    """Values per token of each item where the batch has them in its loss."""
    rows = []
    for part, members in zip(
        batch.groups, getattr(batch, "order", (range(len(values)),)), strict=True
    ):
        out = np.zeros(part.tokens.shape, np.float32)
        for item, (row, start, length) in zip(members, part.placements, strict=True):
            out[row, start : start + length] = values[item][len(values[item]) - length :]
        rows.append(np.where(part.loss_mask, out, np.float32(0)))
    return rows if isinstance(batch, PackedBatch) else rows[0]


def test_a_mesh_gives_the_update_of_one_device():
    shared, plain = batches(rows=4, lengths=(32,))
    graphdef, params = jax.tree.map(lambda x: x, _mesh_model())
    layout = make_layout(data=1, fsdp=2, tensor=2, context=2)
    one, spread = (
        new_updater(graphdef=graphdef, rows_per_microbatch=4, **more)
        for more in ({}, {"layout": layout})
    )
    expected = gradient(one, params, plain)
    for name, found in gradient(spread, params, shared).items():
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5 * largest)


@cache
def _mesh_model():
    from flax import nnx

    return nnx.split(random_decoder(MESH_CONFIG))


def test_a_bundle_that_fits_no_row_is_cut_and_its_trunk_copied():
    prompt = list(range(10))
    group = [sample(prompt, 6, seed) for seed in range(5)]
    made = packed(
        group, row_lengths=(32,), rows_per_microbatch=1, mixed_lengths=False, shared_prompts=True
    )
    # A trunk of 9 and branches of 7: three fit into 32, two into the next row. Plain, two of 16 fit into a row.
    (part,) = made.groups
    assert part.tokens.shape == (2, 32)
    assert [t.length for t in part.trunks] == [9] * 5
    assert len(set(part.trunks)) == 2
    assert made.saved_tokens == 3 * 9
    assert part.segment_ids.max(axis=1).tolist() == [4, 3]


def test_prompts_are_shared_only_where_it_pays():
    short = [sample([1, 2, 3], 20, seed) for seed in range(4)]
    settings = {"rows_per_microbatch": 1, "mixed_lengths": False, "shared_prompts": True}
    # 4 x 23 tokens, or 2 + 4 x 21: two rows of 46 either way.
    assert packed(short, row_lengths=(46,), **settings).saved_tokens == 0
    # 4 x 21 tokens, or 14 + 4 x 7: two rows, or one.
    long = [sample(list(range(15)), 6, seed) for seed in range(4)]
    assert packed(long, row_lengths=(46,), **settings).saved_tokens == 3 * 14
    assert 0.9 < PAYS < 1


def test_a_prompt_that_no_row_holds_is_told():
    message = (
        "a trajectory of 41 tokens fits no row: the longest of batch.row_lengths=(16, 32) is 32."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        packed(
            [sample([1] * 40, 1, seed) for seed in range(3)],
            row_lengths=(16, 32),
            rows_per_microbatch=1,
            mixed_lengths=False,
            shared_prompts=True,
        )


def test_a_prompt_with_sampled_tokens_is_refused():
    message = "item 0 has prompt_tokens=4, but a prompt is the first of its 5 tokens, and none of"
    with pytest.raises(ValueError, match=message):
        packed(
            [sample([1, 2, 3], 2, 0, prompt_tokens=4)],
            row_lengths=(16,),
            rows_per_microbatch=1,
            mixed_lengths=False,
        )


def test_a_step_shares_the_prompts_of_its_groups_if_the_config_says_so():
    groups = [
        [trajectory(1.0, sampled=7, task=task), trajectory(0.0, sampled=5, task=task, sample=1)]
        for task in range(2)
    ]
    found = []
    for how in ("auto", "off"):
        settings = config()
        rows = replace(settings.batch, shared_prompts=how, row_lengths=(16, 64))
        found.append(make_batch(replace(settings, batch=rows), groups)[:2])
    (shared, told), (plain, plain_told) = found
    # Both groups have the prompt 5 6 7 in these cases. Plain: 2 x (11 + 9) tokens in three rows of 16. Shared: a trunk
    # of 2, 2 x (9 + 7) behind it, in one row of 64 (or 16s with a trunk each).
    assert plain_told["perf/shared_prompt_frac"] == 0
    assert told["perf/shared_prompt_frac"] == pytest.approx(3 * 2 / 40)
    for mine, theirs in zip(
        unpack_field("advantages", shared), unpack_field("advantages", plain), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_the_page_shows_a_row_as_it_is_packed_and_a_setting_that_is_taken(tmp_path):
    page = read("shared_prompts.md")
    assert list(wrong_names(page)) == []
    (setting,) = blocks(page, "gin")
    (tmp_path / "run.gin").write_text(setting)
    assert load_config([tmp_path / "run.gin"]).batch.shared_prompts == "auto"
    prompt = [7, 8, 9, 4]
    group = [
        PackItem(
            prompt + own,
            [False] * 4 + [True] * len(own),
            1.0,
            prompt_tokens=4,
        )
        for own in ([5, 6], [2])
    ]
    (row,) = packed(
        group, row_lengths=(8,), rows_per_microbatch=1, mixed_lengths=False, shared_prompts=True
    ).groups
    (drawing,) = blocks(page, "text")
    lines = [line.split() for line in drawing.splitlines()[1:]]
    assert len(lines) == 5
    for name, *shown in lines:
        assert [int(cell) for cell in " ".join(shown).replace(".", "0").split()] == [
            int(x) for x in getattr(row, name)[0]
        ], name
