"""Decoders with random weights that cost no compilation."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tooljax.model.decoder import Decoder, DecoderConfig


@cache
def random_decoder(cfg: DecoderConfig, seed: int = 0) -> Decoder:
    """Norm scales and biases are random too, so that a swapped or dropped one shows. Shared: do not write to it."""
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0))))
    values = {}
    for path, param in nnx.to_flat_state(state):
        value = 0.3 * rng.standard_normal(param.shape) + str(path[-1]).endswith("norm")
        values[path] = param.replace(jnp.asarray(value, jnp.dtype(cfg.dtype)))
    return nnx.merge(graph, nnx.from_flat_state(values))


def in_dtype(decoder: Decoder, cfg: DecoderConfig) -> Decoder:
    """The same weights, rounded to another config's dtype."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(0))))
    params = nnx.state(decoder, nnx.Param)
    return nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.dtype(cfg.dtype)), params))
