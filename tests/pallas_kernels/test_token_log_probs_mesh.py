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

from pallas_kernels.token_log_probs import Shards, token_log_probs, token_loss
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


def _two_passes(shards, values, given):
    """A loss of log-probs and entropies, and their gradients."""

    def total(wrt):
        out = token_log_probs(**(given | wrt), **CALL, shards=shards)
        return jnp.sum(values["weight"] * out.log_prob) + jnp.sum(values["more"] * out.entropy), out

    return jax.grad(total, has_aux=True)({name: given[name] for name in ("hidden", "head")})


def _one_pass(shards, values, given):
    def total(wrt):
        return token_loss(loss_of, values, **(given | wrt), **CALL, shards=shards)

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


def _check_values(passes: str, results) -> None:
    """Against float64 on one device."""
    found, out = results
    slow = Exact(**inputs(SHAPE), temperature=0.7)
    for values, expected in zip(out, slow.values, strict=True):
        close = tol(np.float32, reduced=SHAPE.embed + SHAPE.vocab)
        np.testing.assert_allclose(values, expected, **close)
    values = losses_given(SHAPE.tokens)
    if passes == "one pass":
        expected = slow.gradients(exact_loss(slow, values)[1])
    else:
        expected = slow.gradients(values["weight"], 0.0, values["more"])
    for name, wanted in zip(("hidden", "head"), expected, strict=False):
        assert relative_error(found[name], wanted) < GRADIENT_ERROR[SHAPE.dtype]


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


def test_what_does_not_divide_over_the_mesh_is_refused():
    mesh = mesh_of(data=4, tensor=2)
    given = inputs(Shape(64, 8, 37, "float32"))
    with pytest.raises(ValueError, match=r"vocab=37 does not divide over the 2 devices of shards"):
        token_log_probs(**given, shards=Shards("data", "tensor", mesh))
    given = inputs(Shape(62, 8, 36, "float32"))
    with pytest.raises(ValueError, match=r"tokens=62 does not divide .* pad with tokens that are"):
        token_log_probs(**given, shards=Shards(("data",), "tensor", mesh))
    with pytest.raises(ValueError, match=r"shards.tokens='fsdp' names 'fsdp', which the mesh of"):
        token_log_probs(**given, shards=Shards("fsdp", None, mesh))
