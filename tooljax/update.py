"""One update of the policy: log-probs, loss, gradients, AdamW.

Log-probs are of the sampled tokens only, in float32, under the temperature they were sampled with; logits are never
materialised (pallas_kernels.token_log_probs). A batch is cut into microbatches of static shape, whose gradients add
up: with one denominator, the number of loss tokens of the whole batch, the cut does not change the result. Their number
may differ from step to step without compiling anew.

Trained weights are float32 also when the model computes in bfloat16: an update of 1e-6 would vanish in a bfloat16
weight. They are rounded once an update, as are the weights that are sent to the engines.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.token_log_probs import token_log_probs, token_loss
from tooljax.batch import TrainBatch
from tooljax.grpo.aggregation import token_mean
from tooljax.grpo.kl import k3
from tooljax.grpo.policy_losses import clipped_ratio_loss, importance_ratio
from tooljax.model.decoder import Decoder
from tooljax.optimizer import Optimizer
from tooljax.pytree import pytree_dataclass

Params = Any
"""The weights of a decoder, as nnx.split gives them."""

Loss = Literal["grpo", "sft"]
Means = dict[str, Array]
Metrics = dict[str, float]

_LARGEST = ("policy/ratio_max",)
"""Metrics that are the largest over tokens; the others are means."""

_WHOLE, _ROWS = PartitionSpec(), PartitionSpec("data")


@pytree_dataclass
class TrainState:
    """What an update changes."""

    params: Params
    """float32."""
    opt_state: Any
    step: Int[Array, ""]
    """Updates made, counting those that were skipped."""


class Updater:
    """Compiles once, then updates. With a mesh, the rows of a microbatch are spread over its axis `data`."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer,
        *,
        dtype: str,
        temperature: float,
        clip_low: float,
        clip_high: float,
        kl_coef: float,
        rows_per_microbatch: int,
        remat: bool,
        mesh: Mesh | None = None,
    ):
        if mesh is not None and rows_per_microbatch % mesh.shape["data"]:
            raise ValueError(
                f"rows_per_microbatch={rows_per_microbatch} cannot be spread over {mesh.shape['data']} "
                "devices; set batch.rows_per_microbatch to a multiple"
            )
        self._graphdef = graphdef
        self._optimizer = optimizer
        self._dtype = jnp.dtype(dtype)
        self._temperature = temperature
        self._clip_low, self._clip_high = clip_low, clip_high
        self._kl_coef = kl_coef
        self._rows = rows_per_microbatch
        self._remat = remat
        self._mesh = mesh
        self._cast = jax.jit(partial(_cast, dtype=self._dtype))
        self._zeros = jax.jit(_zeros)
        self._forward = jax.jit(self._spread(self._forward_only, (_WHOLE, _ROWS), _ROWS))
        self._accumulate: dict[str, Callable] = {
            loss: jax.jit(
                self._spread(step, (_WHOLE, _WHOLE, _ROWS, _WHOLE), _WHOLE), donate_argnums=0
            )
            for loss, step in {
                "grpo": partial(self._add_gradients, self._grpo_loss),
                "sft": partial(self._add_gradients, self._sft_loss),
            }.items()
        }
        self._apply = jax.jit(self._apply_gradients, donate_argnums=0)

    # --- what the training loop calls ---------------------------------------------------------------------------

    def init(self, params: Params) -> TrainState:
        """The state before the first update. Copies `params`: they stay usable, for example as the reference."""
        master = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        state = TrainState(
            params=master,
            opt_state=self._optimizer.init(master),
            step=jnp.zeros((), jnp.int32),
        )
        return state if self._mesh is None else jax.device_put(state, self._placement(_WHOLE))

    def compute_params(self, state: TrainState) -> Params:
        """The weights in the model's dtype: what the loss uses, and what is sent to the engines.

        For a float32 model these are the very arrays of `state`, which the next update consumes.
        """
        return self._in_model_dtype(state.params)

    def log_probs(self, params: Params, batch: TrainBatch) -> Float[np.ndarray, "rows time"]:
        """Log-probs of the loss tokens under `params`, 0 elsewhere: old_log_probs or ref_log_probs of the batch."""
        compute = self._in_model_dtype(params)
        out = np.zeros(batch.tokens.shape, np.float32)
        for i, microbatch in enumerate(batch.microbatches(self._rows)):
            if microbatch.loss_tokens:
                values = self._forward(compute, self._placed(microbatch))
                out[i * self._rows : (i + 1) * self._rows] = jax.device_get(values)
        return out

    def update(
        self, state: TrainState, batch: TrainBatch, *, loss: Loss = "grpo"
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on the whole batch; consumes `state`.

        "sft" is the mean negative log-likelihood of the loss tokens, at temperature 1 and without advantages.
        A batch without loss tokens, or a loss or gradient that is not finite, leaves weights and moments as they are
        and reports optim/skipped = 1.
        """
        tokens = batch.loss_tokens
        if tokens == 0:
            rate = self._optimizer.learning_rate(state.step)
            state = TrainState(state.params, state.opt_state, state.step + 1)
            return state, {"optim/skipped": 1.0, "optim/learning_rate": float(rate)}
        if loss == "grpo" and self._kl_coef > 0 and batch.ref_log_probs is None:
            raise ValueError(
                f"kl_coef={self._kl_coef} needs the log-probs of the reference policy: fill "
                "batch.ref_log_probs, or set grpo.kl_coef=0"
            )
        compute = self._in_model_dtype(state.params)
        denominator = jax.device_put(np.float32(tokens))
        totals = self._zeros(state.params), self._no_means(loss, batch)
        for microbatch in batch.microbatches(self._rows):
            if microbatch.loss_tokens:
                placed = self._placed(microbatch)
                totals = self._accumulate[loss](totals, compute, placed, denominator)
        state, metrics = self._apply(state, *totals)
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}

    # --- what is compiled ---------------------------------------------------------------------------------------

    def _forward_only(self, params: Params, batch: TrainBatch) -> Float[Array, "rows time"]:
        decoder = nnx.merge(self._graphdef, params)
        return sampled_log_probs(decoder, batch, temperature=self._temperature)[0]

    def _add_gradients(
        self,
        loss: Callable[..., tuple[Array, Means]],
        totals: tuple[Params, Means],
        params: Params,
        batch: TrainBatch,
        denominator: Float[Array, ""],
    ) -> tuple[Params, Means]:
        """Adds a microbatch's part of the gradient and of the metrics to what earlier ones gave."""
        gradients, means = jax.grad(loss, has_aux=True)(params, batch, denominator)
        if self._mesh is not None:
            largest = jax.lax.pmax(means, "data")
            gradients, means = jax.lax.psum((gradients, means), "data")
            means |= {name: largest[name] for name in means if name in _LARGEST}
        summed = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), totals[0], gradients)
        return summed, {
            name: (jnp.maximum if name in _LARGEST else jnp.add)(totals[1][name], value)
            for name, value in means.items()
        }

    def _grpo_loss(
        self, params: Params, batch: TrainBatch, denominator: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Means]:
        """Token mean of the clipped surrogate plus kl_coef times k3, and what is reported beside it."""
        decoder = nnx.merge(self._graphdef, params)
        given = {"advantages": batch.advantages, "old": batch.old_log_probs}
        given["ref"] = batch.ref_log_probs if self._kl_coef > 0 else None
        loss, log_probs, entropy = sampled_loss(
            decoder,
            batch,
            self._loss_of_token,
            given,
            denominator,
            temperature=self._temperature,
            remat=self._remat,
        )
        old = log_probs if batch.old_log_probs is None else batch.old_log_probs
        mean = partial(token_mean, mask=batch.loss_mask, denominator=denominator)
        clipped = self._surrogate(log_probs, old, batch.advantages)[1]
        ratio = importance_ratio(log_probs, old)
        means = {
            "policy/clip_frac": mean(clipped.astype(jnp.float32)),
            "policy/entropy": mean(entropy),
            "policy/kl_mismatch": mean(k3(batch.rollout_log_probs, old)),
            "policy/ratio_max": jnp.max(jnp.where(batch.loss_mask, ratio, 0.0)),
        }
        if batch.ref_log_probs is not None:
            means["policy/kl_ref"] = mean(k3(log_probs, batch.ref_log_probs))
        return loss, means | {"policy/loss": loss}

    def _loss_of_token(self, log_probs: Array, given: dict[str, Array]) -> Array:
        """The clipped surrogate plus kl_coef times k3, token by token."""
        old = given["old"]
        # Before a batch's first update the two are equal: the ratio is 1, and only its gradient matters.
        old = jax.lax.stop_gradient(log_probs) if old is None else old
        loss = self._surrogate(log_probs, old, given["advantages"])[0]
        if given["ref"] is not None:
            loss = loss + self._kl_coef * k3(log_probs, given["ref"])
        return loss * given["share"]

    def _surrogate(self, log_probs, old, advantages) -> tuple[Array, Array]:
        return clipped_ratio_loss(
            log_probs, old, advantages, clip_low=self._clip_low, clip_high=self._clip_high
        )

    def _sft_loss(
        self, params: Params, batch: TrainBatch, denominator: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Means]:
        """Mean negative log-likelihood of the loss tokens, under the untempered distribution."""
        decoder = nnx.merge(self._graphdef, params)
        loss, _, entropy = sampled_loss(
            decoder, batch, _negative, {}, denominator, temperature=1.0, remat=self._remat
        )
        entropy = token_mean(entropy, batch.loss_mask, denominator)
        return loss, {"policy/loss": loss, "policy/entropy": entropy}

    def _apply_gradients(
        self, state: TrainState, gradients: Params, means: Means
    ) -> tuple[TrainState, Means]:
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(means["policy/loss"])
        rate = self._optimizer.learning_rate(state.step)
        direction, opt_state = self._optimizer.direction(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        return TrainState(params, opt_state, state.step + 1), means | {
            "optim/grad_norm": norm,
            "optim/learning_rate": rate,
            "optim/skipped": 1.0 - finite.astype(jnp.float32),
        }

    # --- small parts --------------------------------------------------------------------------------------------

    def _no_means(self, loss: Loss, batch: TrainBatch) -> Means:
        """Zeros for the metrics of this loss, to which microbatches add."""
        names = ["policy/loss", "policy/entropy"]
        if loss == "grpo":
            names += ["policy/clip_frac", "policy/kl_mismatch", *_LARGEST]
            names += [] if batch.ref_log_probs is None else ["policy/kl_ref"]
        return jax.device_put(dict.fromkeys(names, np.float32(0)))

    def _in_model_dtype(self, params: Params) -> Params:
        same = all(leaf.dtype == self._dtype for leaf in jax.tree.leaves(params))
        return params if same else self._cast(params)

    def _placed(self, batch: TrainBatch) -> TrainBatch:
        return jax.device_put(batch, None if self._mesh is None else self._placement(_ROWS))

    def _placement(self, spec: PartitionSpec) -> NamedSharding:
        assert self._mesh is not None, "only called with a mesh"
        return NamedSharding(self._mesh, spec)

    def _spread(self, function: Callable, inputs: tuple, outputs: PartitionSpec) -> Callable:
        """The function on each device's rows, with explicit sums over devices inside."""
        if self._mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )


def sampled_log_probs(
    decoder: Decoder,
    batch: TrainBatch,
    *,
    temperature: float,
    remat: bool = False,
) -> tuple[Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Log-prob of each loss token given the earlier tokens of its segment, and the entropy of what it was drawn from.

    Both are 0 where loss_mask is False.
    """
    hidden, targets, valid = _predictions(decoder, batch, remat=remat)
    out = token_log_probs(
        hidden, decoder.head_weight(), targets, valid=valid, temperature=temperature
    )
    return _at_targets(out.log_prob, batch), _at_targets(out.entropy, batch)


def sampled_loss(
    decoder: Decoder,
    batch: TrainBatch,
    loss_of: Callable[[Array, Any], Array],
    given: dict[str, Array | None],
    denominator: Float[Array, ""],
    *,
    temperature: float,
    remat: bool = False,
) -> tuple[Float[Array, ""], Float[Array, "rows time"], Float[Array, "rows time"]]:
    """Sum of loss_of(log_probs, given) over loss tokens; log-probs and entropy as above, without gradients.

    The head's gradient is made in the same pass, which is exact because each token's loss depends on its own log-prob
    alone. `given` are values per token, to which "share" is added: 1 / denominator, for loss_of to multiply by.
    """
    hidden, targets, valid = _predictions(decoder, batch, remat=remat)
    values = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1).reshape(-1), given)
    values["share"] = jnp.broadcast_to(1.0 / jnp.maximum(denominator, 1.0), targets.shape)
    loss, out = token_loss(
        loss_of,
        values,
        hidden,
        decoder.head_weight(),
        targets,
        valid=valid,
        temperature=temperature,
    )
    return loss, _at_targets(out.log_prob, batch), _at_targets(out.entropy, batch)


def _predictions(decoder: Decoder, batch: TrainBatch, *, remat: bool) -> tuple[Array, Array, Array]:
    """Hidden states, the tokens they predict, and whether those are in the loss; rows and time as one axis."""
    tokens, mask = jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask)
    hidden = decoder.hidden(tokens, batch.positions, batch.segment_ids, remat=remat)
    rows, time, embed = hidden.shape
    # The hidden state at t - 1 predicts token t. Rolling keeps the static shape; what wraps around is masked, because
    # the first token of a row is never in the loss.
    targets, valid = (jnp.roll(x, -1, axis=1).reshape(-1) for x in (tokens, mask))
    return hidden.reshape(rows * time, embed), targets, valid


def _at_targets(values: Array, batch: TrainBatch) -> Float[Array, "rows time"]:
    return jnp.roll(values.reshape(batch.tokens.shape), 1, axis=1)


def _negative(log_probs: Array, given: dict[str, Array]) -> Array:
    return -log_probs * given["share"]


def _cast(params: Params, *, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _zeros(params: Params) -> Params:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
