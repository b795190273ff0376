"""What a decoder says of the sampled tokens of a batch: log-probs, entropies, and sums of losses.

Logits are never materialised (pallas_kernels.token_log_probs). Everything is laid out as the batch is, and is 0 where
loss_mask is False.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.token_log_probs import Shards, token_log_probs, token_loss
from tooljax.batch import TrainBatch
from tooljax.model.decoder import Decoder
from tooljax.model.remat import Remat
from tooljax.sharding import Layout


class Sampled(NamedTuple):
    """What a decoder says of the tokens of a batch."""

    log_probs: Float[Array, "rows time"]
    """Of each loss token given the earlier tokens of its segment."""
    entropy: Float[Array, "rows time"]
    """Of the distribution that it was drawn from."""


def sampled_log_probs(
    decoder: Decoder,
    batch: TrainBatch,
    *,
    temperature: float,
    remat: Remat = "none",
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Log-prob of each loss token given the earlier tokens of its segment, and the entropy of what it was drawn from.

    Both are 0 where loss_mask is False.
    """
    layout = decoder.layout
    hidden, targets, valid = _predictions(decoder, batch, remat=remat)
    with jax.named_scope("head"):
        out = token_log_probs(
            hidden,
            _head(decoder),
            targets,
            valid=valid,
            temperature=temperature,
            shards=_shards(layout),
        )
    return _at_targets(out.log_prob, batch, layout), _at_targets(out.entropy, batch, layout)


def sampled_loss(
    decoder: Decoder | Sampled,
    batch: TrainBatch,
    loss_of: Callable[[Array, Any], Array],
    given: dict[str, Array | None],
    denominator: Float[Array, ""],
    *,
    temperature: float,
    remat: Remat = "none",
) -> tuple[Float[Array, ""], Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Sum of loss_of(log_probs, given) over loss tokens; log-probs and entropy as above, without gradients.

    The head's gradient is made in the same pass, which is exact because each token's loss depends on its own log-prob
    alone. `given` are values per token, to which "share" is added: 1 / denominator, for loss_of to multiply by.
    What a decoder has said before can stand for it, without gradients: a replay.
    """
    if isinstance(decoder, Sampled):
        values = given | {"share": 1.0 / jnp.maximum(denominator, 1.0)}
        losses = loss_of(decoder.log_probs, values)
        return jnp.sum(jnp.where(batch.loss_mask, losses, 0.0)), decoder.log_probs, decoder.entropy
    layout = decoder.layout
    hidden, targets, valid = _predictions(decoder, batch, remat=remat)
    values = jax.tree.map(lambda x: layout.merged(jnp.roll(x, -1, axis=1)), given)
    values["share"] = jnp.broadcast_to(1.0 / jnp.maximum(denominator, 1.0), targets.shape)
    with jax.named_scope("head"):
        loss, out = token_loss(
            loss_of,
            values,
            hidden,
            _head(decoder),
            targets,
            valid=valid,
            temperature=temperature,
            shards=_shards(layout),
        )
    return loss, _at_targets(out.log_prob, batch, layout), _at_targets(out.entropy, batch, layout)


def _predictions(
    decoder: Decoder, batch: TrainBatch, *, remat: Remat
) -> tuple[Array, Array, Array]:
    """Hidden states, the tokens they predict, and whether those are in the loss; rows and time as one axis."""
    tokens, mask = jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask)
    hidden = decoder.hidden(
        tokens, batch.positions, batch.segment_ids, batch.trunk_ids, remat=remat
    )
    # The hidden state at t - 1 predicts token t. Rolling keeps the static shape; what wraps around is masked, because
    # the first token of a row is never in the loss.
    merged = decoder.layout.merged
    targets, valid = (merged(jnp.roll(x, -1, axis=1)) for x in (tokens, mask))
    return merged(hidden), targets, valid


def _head(decoder: Decoder) -> Array:
    return decoder.layout.gather(decoder.head_weight(), "vocab", "embed")


def _shards(layout: Layout) -> Shards:
    """Over which devices the tokens of the batch and the vocabulary are spread."""
    if layout.mesh is None:
        return Shards()
    tokens, vocab = layout.token_splits, layout.splits("vocab")
    return Shards(tokens or None, vocab or None, layout.mesh, layout.stored_splits("embed") or None)


def _at_targets(values: Array, batch: TrainBatch, layout: Layout) -> Float[Array, "rows time"]:
    return jnp.roll(layout.parted(values, batch.tokens.shape[0]), 1, axis=1)
