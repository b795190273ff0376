"""The update's gradient, made with the loss in one pass over the head, against differentiated log-probs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from update_cases import gradient, model, new_items, new_updater

from tooljax.batch import pack
from tooljax.grpo.aggregation import token_mean
from tooljax.grpo.kl import k3
from tooljax.grpo.policy_losses import clipped_ratio_loss
from tooljax.sampled import sampled_log_probs

# Of the norm of each weight's gradient. bfloat16 rounds twice on the way here and twice there: measured 6e-3.
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_one_pass_gives_the_gradient_of_two(dtype):
    graphdef, params = model(dtype)
    batch = pack(new_items(), row_lengths=(48,), rows_multiple=1)
    shape = batch.tokens.shape
    rng = np.random.default_rng(1)
    # The tiny model's log-probs are near -ln 19 = -2.9; shifts of up to 0.6 clip some ratios on either side.
    old, ref = (-2.9 + rng.uniform(-d, d, shape).astype(np.float32) for d in (0.6, 1.0))
    batch = batch.with_log_probs(
        old=np.where(batch.loss_mask, old, np.float32(0)),
        ref=np.where(batch.loss_mask, ref, np.float32(0)),
    )

    def loss(params, batch, tokens):
        log_probs, _ = sampled_log_probs(nnx.merge(graphdef, params), batch, temperature=0.7)
        surrogate = clipped_ratio_loss(
            log_probs, batch.old_log_probs, batch.advantages, clip_low=0.2, clip_high=0.3
        )[0]
        per_token = surrogate + 0.5 * k3(log_probs, batch.ref_log_probs)
        return token_mean(per_token, batch.loss_mask, tokens)

    placed, tokens = jax.device_put(batch), jnp.float32(batch.loss_tokens)
    slow = jax.jit(jax.grad(loss))(params, placed, tokens)
    expected = jax.tree_util.tree_leaves_with_path(slow)
    updater = new_updater(dtype=dtype, kl_coef=0.5, temperature=0.7)
    found = gradient(updater, params, batch)
    for path, leaf in expected:
        wanted = np.asarray(leaf, np.float64)
        difference = np.linalg.norm(found[jax.tree_util.keystr(path)] - wanted)
        assert difference < LARGEST_ERROR[dtype] * np.linalg.norm(wanted), path
