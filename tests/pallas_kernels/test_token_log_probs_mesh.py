"""Tokens and vocabulary spread over 8 devices: values, gradients, and what is communicated for them."""

import math
import re
from collections import Counter
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from token_log_probs_cases import mesh_of
from token_log_probs_exact import (
    GRADIENT_ERROR,
    Exact,
    exact_loss,
    inputs,
    loss_of,
    losses_given,
    relative_error,
)

from pallas_kernels.token_log_probs import Shards, token_log_probs, token_loss, tpu
from pallas_kernels.token_log_probs.mosaic import Tiles
from pallas_kernels.token_log_probs.shapes import Shape
from tolerance import tol

SHAPE = Shape(96, 40, 8 * 37, "float32")
"""No part of the vocabulary has a round size; each device has several chunks of tokens."""
CHUNK = 8
CALL = {"implementation": "chunked", "chunk_tokens": CHUNK, "temperature": 0.7}

MIXES = {
    "data 4 x tensor 2": ({"data": 4, "tensor": 2}, "data", "tensor"),
    "tensor 8": ({"tensor": 8}, None, "tensor"),
    "data 8": ({"data": 8}, "data", None),
    "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp"), "tensor"),
}

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def _two_passes(shards, values, given, **options):
    """A loss of log-probs and entropies, and their gradients."""

    def total(wrt):
        out = token_log_probs(**(given | wrt), **(CALL | options), shards=shards)
        return jnp.sum(values["weight"] * out.log_prob) + jnp.sum(values["more"] * out.entropy), out

    return jax.grad(total, has_aux=True)({name: given[name] for name in ("hidden", "head")})


def _one_pass(shards, values, given, **options):
    def total(wrt):
        return token_loss(loss_of, values, **(given | wrt), **(CALL | options), shards=shards)

    wrt = {name: given[name] for name in ("hidden", "head")}
    (_, out), found = jax.value_and_grad(total, has_aux=True)(wrt)
    return found, out


PASSES = {"two passes": _two_passes, "one pass": _one_pass}


class Made(NamedTuple):
    mesh: jax.sharding.Mesh
    specs: dict[str, PartitionSpec]
    rows: PartitionSpec
    given: dict[str, jax.Array]
    values: dict[str, jax.Array]


def _made(mix: str) -> Made:
    sizes, tokens, vocab = MIXES[mix]
    mesh, rows = mesh_of(**sizes), PartitionSpec(tokens)
    specs = {"hidden": rows, "head": PartitionSpec(vocab), "targets": rows, "valid": rows}

    def put(values, spec):
        return jax.device_put(values, NamedSharding(mesh, spec))

    given = {name: put(values, specs[name]) for name, values in inputs(SHAPE).items()}
    values = {name: put(each, rows) for name, each in losses_given(SHAPE.tokens).items()}
    return Made(mesh, specs, rows, given, values)


def _compiled(mix: str, passes: str, made: Made, *, inside: bool):
    """On whole arrays of a mesh, or `inside` a shard_map of the caller's."""
    _, tokens, vocab = MIXES[mix]
    if not inside:
        call = partial(PASSES[passes], Shards(tokens, vocab, made.mesh))
    else:
        found = ({"hidden": made.rows, "head": made.specs["head"]}, made.rows)
        call = jax.shard_map(
            partial(PASSES[passes], Shards(tokens, vocab)),
            mesh=made.mesh,
            in_specs=(made.rows, made.specs),
            out_specs=found,
            check_vma=False,
        )
    return jax.jit(call).lower(made.values, made.given).compile()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("passes", PASSES)
def test_values_gradients_and_communication_over_a_mesh(mix, passes):
    made = _made(mix)
    compiled = _compiled(mix, passes, made, inside=False)
    _check_values(passes, compiled(made.values, made.given))
    _check_communication(mix, passes, compiled.as_text() or "")


@pytest.mark.parametrize("passes", PASSES)
def test_the_same_inside_a_shard_map_of_the_callers(passes):
    mix = "data 4 x tensor 2"
    made = _made(mix)
    _check_values(passes, _compiled(mix, passes, made, inside=True)(made.values, made.given))


def _check_values(passes: str, results, shape: Shape = SHAPE, given=None) -> None:
    """Against float64 on one device."""
    found, out = results
    slow = Exact(**(given or inputs(shape)), temperature=0.7)
    # A log-prob is a difference of logits, and the softmax a power of it: as exact as large logits are.
    size = float(np.abs(slow.values.log_normaliser).max())
    for values, expected in zip(out, slow.values, strict=True):
        close = tol(np.float32, reduced=shape.embed + shape.vocab)
        close["atol"] *= max(1.0, size)
        np.testing.assert_allclose(values, expected, **close)
    values = losses_given(shape.tokens)
    if passes == "one pass":
        expected = slow.gradients(exact_loss(slow, values)[1])
    else:
        expected = slow.gradients(values["weight"], 0.0, values["more"])
    for name, wanted in zip(("hidden", "head"), expected, strict=False):
        allowed = max(GRADIENT_ERROR[shape.dtype], size * np.finfo(np.float32).eps)
        assert relative_error(found[name], wanted) < allowed, name


def _check_communication(mix: str, passes: str, text: str) -> None:
    """Each gradient is summed once, over those that share what it is of; all else is a few numbers a token."""
    sizes, tokens, vocab = MIXES[mix]
    ways = sizes["tensor"] if vocab else 1
    rows = SHAPE.tokens // (8 // ways)
    of_hidden, of_head = rows * SHAPE.embed, SHAPE.vocab // ways * SHAPE.embed
    found = _collectives(text)
    large = [each for each in found if each.elements > 4 * ways * rows]
    gradients = ([of_hidden] if vocab else []) + ([of_head] if tokens else [])
    assert sorted(each.elements for each in large) == sorted(gradients), found
    assert {each.kind for each in large} == {"all-reduce"}
    # After the loop over chunks, not in it.
    assert {each.computation for each in large} == {"ENTRY"}
    small = Counter(each.kind for each in found if each not in large)
    # Two passes: the statistics of all shards at once. One pass, for each chunk: the target's logit and the maximum,
    # then the sums, which XLA makes two or three of.
    if vocab and passes == "one pass":
        assert set(small) == {"all-reduce"}, found
        assert small["all-reduce"] <= 3, found
    else:
        assert small == ({"all-gather": 1} if vocab else {}), found


def test_the_heads_gradient_comes_back_in_parts():
    """Split along embed over fsdp: a reduce-scatter, and an all-reduce of the part over data."""
    mix = "data 2 x fsdp 2 x tensor 2"
    made = _made(mix)
    _, tokens, vocab = MIXES[mix]
    call = partial(_one_pass, Shards(tokens, vocab, made.mesh, embed="fsdp"))
    compiled = jax.jit(call).lower(made.values, made.given).compile()
    found, out = compiled(made.values, made.given)
    _check_values("one pass", (found, out))
    assert found["head"].sharding.spec == PartitionSpec("tensor", "fsdp")
    part = SHAPE.vocab // 2 * SHAPE.embed // 2
    large = [each for each in _collectives(compiled.as_text() or "") if each.elements >= part]
    # Of hidden's gradient too: summed over the vocabulary's devices.
    wanted = ["all-reduce", "all-reduce", "reduce-scatter"]
    assert sorted(each.kind for each in large) == wanted or len(large) == 2, large
    assert ("reduce-scatter", part) in [each[:2] for each in large]


@pytest.mark.parametrize("embed", ["tensor", "data"])
def test_parts_of_the_heads_gradient_that_cannot_be(embed):
    made = _made("data 4 x tensor 2" if embed == "tensor" else "data 8")
    shards = Shards("data", "tensor" if embed == "tensor" else None, made.mesh, embed)
    given = made.given | {
        "hidden": made.given["hidden"][:, :36],
        "head": made.given["head"][:, :36],
    }
    with pytest.raises(ValueError, match=f"shards.embed='{embed}' must be of shards.tokens='data'"):
        token_log_probs(**given, **CALL, shards=shards)


class Collective(NamedTuple):
    kind: str
    elements: int
    computation: str


def _collectives(text: str) -> list[Collective]:
    """Those of a compiled program, with the elements of all their results."""
    found, computation = [], ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            computation = "ENTRY" if line.startswith("ENTRY") else line.split()[0]
        match = re.match(
            r".*? = (.*?) (all-\w+|reduce-scatter|collective-permute)(-start)?\(", line
        )
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            elements = sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
            found.append(Collective(match[2], elements, computation))
    return found


ODD = {
    "5 of 8 columns left": (Shape(96, 40, 8 * 37 + 5, "float32"), "tensor 8"),
    "3 tokens on 4 devices, 37 columns on 2": (Shape(3, 16, 37, "float32"), "data 4 x tensor 2"),
}
QUICK = {"xla_backend_optimization_level": 0}
"""The time goes into compiling."""


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("passes", PASSES)
def test_tokens_and_vocabulary_that_do_not_divide_over_the_mesh(odd, passes):
    shape, mix = ODD[odd]
    given = inputs(shape)
    # Every kind of target: of the first shard, of the last, and each of the columns that do not divide.
    targets = np.asarray(given["targets"]).copy()
    targets[-1], targets[: len(targets) // 2] = (
        0,
        shape.vocab - 1 - np.arange(len(targets) // 2) % 7,
    )
    given["targets"] = jnp.asarray(targets)
    _check_odd(shape, mix, passes, given, {})


def _check_odd(shape: Shape, mix: str, passes: str, given, options) -> None:
    sizes, tokens, vocab = MIXES[mix]
    call = partial(PASSES[passes], Shards(tokens, vocab, mesh_of(**sizes)), **options)
    results = jax.jit(call, compiler_options=QUICK)(losses_given(shape.tokens), given)
    _check_values(passes, results, shape, given)


def test_a_bias_and_a_turned_head_that_do_not_divide_over_the_mesh():
    shape = Shape(61, 24, 75, "float32")
    given = inputs(shape, bias=True)
    slow = Exact(**given, temperature=0.7, soft_cap=5.0)
    shards = Shards("data", "tensor", mesh_of(data=4, tensor=2))
    values = losses_given(shape.tokens)

    def total(wrt):
        options = given | {"head_axes": "embed vocab", "soft_cap": 5.0, "shards": shards}
        return token_loss(loss_of, values, **(options | wrt), **CALL)[0]

    wrt = {"hidden": given["hidden"], "head": given["head"].T, "bias": given["bias"]}
    found = jax.jit(jax.grad(total), compiler_options=QUICK)(wrt)
    expected = slow.gradients(exact_loss(slow, values)[1])
    found["head"] = found["head"].T
    for name, wanted in zip(("hidden", "head", "bias"), expected, strict=True):
        assert relative_error(found[name], wanted) < GRADIENT_ERROR[shape.dtype], name


def test_the_kernels_for_tpus_take_an_odd_vocabulary_over_a_mesh():
    # The targets' logits are hundreds below the best: what takes the maximum of all shards and of the rest.
    shape = Shape(9, 16, 2 * 131 + 1, "float32")
    given = inputs(shape, spread=200.0)
    best = shape.vocab - 1
    given["head"] = given["head"].at[best].set(given["head"][best] * 3)
    options = {"implementation": "tpu", "chunk_tokens": None}
    tiles = Tiles(block=128, columns=128, resident=128)
    with tpu.compiled_for(tpu.Device("TPU v5 lite", interpret=True, tiles=tiles)):
        _check_odd(shape, "data 4 x tensor 2", "one pass", given, options)


def test_a_target_outside_an_odd_vocabulary_is_nan_and_leaves_no_gradient_in_it():
    shape = Shape(5, 8, 37, "float32")
    given = inputs(shape)
    given["targets"] = jnp.full((5,), 37, jnp.int32)
    shards = Shards("data", "tensor", mesh_of(data=4, tensor=2))

    def total(head):
        out = token_log_probs(**(given | {"head": head}), **CALL, shards=shards)
        return jnp.sum(out.log_normaliser), out

    grad = jax.jit(jax.grad(total, has_aux=True), compiler_options=QUICK)
    d_head, out = grad(given["head"])
    assert np.isnan(out.log_prob[np.asarray(given["valid"])]).all()
    assert np.isfinite(d_head).all()


def test_what_a_mesh_cannot_hold_is_refused():
    mesh = mesh_of(data=4, tensor=2)
    given = inputs(Shape(64, 8, 1, "float32"))
    with pytest.raises(ValueError, match=r"vocab=1 is less than the 2 devices of shards.vocab"):
        token_log_probs(**given, shards=Shards("data", "tensor", mesh))
    with pytest.raises(ValueError, match=r"shards.tokens='fsdp' names 'fsdp', which the mesh of"):
        token_log_probs(**given, shards=Shards("fsdp", None, mesh))
