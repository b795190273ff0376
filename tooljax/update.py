"""One update of the policy: log-probs, gradients of an objective, AdamW.

Log-probs are of the sampled tokens only, in float32, under the temperature they were sampled with; what is minimised is
in `tooljax.objective`. A batch is cut into microbatches of static shape, whose gradients add up: with denominators of
the whole batch, the cut does not change the result. Their number may differ from step to step without compiling anew.

Trained weights are float32 also when the model computes in bfloat16: an update of 1e-6 would vanish in a bfloat16
weight. They are rounded once an update, as are the weights that are sent to the engines.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tooljax.batch import TrainBatch
from tooljax.objective import LARGEST, Means, Objective, SftObjective
from tooljax.optimizer import Optimizer
from tooljax.pytree import pytree_dataclass
from tooljax.sampled import Sampled, sampled_log_probs

Params = Any
"""The weights of a decoder, as nnx.split gives them."""

Loss = Literal["grpo", "sft"]
Metrics = dict[str, float]

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
        objective: Objective,
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
        self._objectives: dict[str, Objective] = {"grpo": objective, "sft": SftObjective()}
        self._rows = rows_per_microbatch
        self._remat = remat
        self._mesh = mesh
        self._cast = jax.jit(partial(_cast, dtype=self._dtype))
        self._zeros = jax.jit(_zeros)
        self._forward = jax.jit(self._spread(self._forward_only, (_WHOLE, _ROWS), _ROWS))
        self._accumulate: dict[str, Callable] = {
            loss: jax.jit(
                self._spread(
                    partial(self._add_gradients, minimised),
                    (_WHOLE, _WHOLE, _ROWS, _WHOLE),
                    (_WHOLE, _ROWS),
                ),
                donate_argnums=0,
            )
            for loss, minimised in self._objectives.items()
        }
        self._apply = jax.jit(self._apply_gradients, donate_argnums=0)
        self.seen: list[Sampled | None] = []
        """Of each microbatch of the last update, on the devices: the log-probs that its loss was made from. None for
        those without loss tokens."""
        self.prepared: Float[np.ndarray, "rows time"] | None = None
        """The log-probs that the objective asked for before the last update; None if it needed none."""

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
        self,
        state: TrainState,
        batch: TrainBatch,
        *,
        loss: Loss = "grpo",
        kl_coef: float | None = None,
        limits: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on the whole batch; consumes `state`.

        "sft" is the mean negative log-likelihood of the loss tokens, at temperature 1 and without advantages.
        `kl_coef` is the weight of the KL in this update, where it is not the objective's own.
        `limits` are from and to which metrics of the update may be (`Guard.update_limits`).
        A batch without loss tokens, a loss or gradient that is not finite, or a metric beyond its limits leaves weights
        and moments as they are and reports optim/skipped = 1.
        """
        tokens = batch.loss_tokens
        self.seen, self.prepared = [], None
        if tokens == 0:
            return self._skipped(state, {})
        compute = self._in_model_dtype(state.params)
        objective = self._objectives[loss]
        batch, told = objective.prepare(batch, partial(self._prepared, compute), kl_coef=kl_coef)
        tokens = batch.loss_tokens
        if tokens == 0:
            return self._skipped(state, told)
        denominator = jax.device_put(np.float32(tokens))
        no_means = jax.device_put(dict.fromkeys(objective.metrics(batch), np.float32(0)))
        totals = self._zeros(state.params), no_means
        for microbatch in batch.microbatches(self._rows):
            sampled = None
            if microbatch.loss_tokens:
                placed = self._placed(microbatch)
                totals, sampled = self._accumulate[loss](totals, compute, placed, denominator)
            self.seen.append(sampled)
        bounds = jax.device_put(
            {name: np.asarray(pair, np.float32) for name, pair in limits.items()}
        )
        state, metrics = self._apply(state, *totals, bounds)
        return state, told | {name: float(x) for name, x in jax.device_get(metrics).items()}

    # --- what is compiled ---------------------------------------------------------------------------------------

    def _forward_only(self, params: Params, batch: TrainBatch) -> Float[Array, "rows time"]:
        decoder = nnx.merge(self._graphdef, params)
        return sampled_log_probs(decoder, batch, temperature=self._temperature)[0]

    def _add_gradients(
        self,
        objective: Objective,
        totals: tuple[Params, Means],
        params: Params,
        batch: TrainBatch,
        denominator: Float[Array, ""],
    ) -> tuple[tuple[Params, Means], Sampled]:
        """Adds a microbatch's part of the gradient and of the metrics to what earlier ones gave."""

        def loss(params: Params) -> tuple[Float[Array, ""], tuple[Means, Sampled]]:
            value, means, sampled = objective(
                nnx.merge(self._graphdef, params),
                batch,
                denominator,
                temperature=self._temperature,
                remat=self._remat,
            )
            return value, (means, sampled)

        gradients, (means, sampled) = jax.grad(loss, has_aux=True)(params)
        if self._mesh is not None:
            largest = jax.lax.pmax(means, "data")
            gradients, means = jax.lax.psum((gradients, means), "data")
            means |= {name: largest[name] for name in means if name in LARGEST}
        summed = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), totals[0], gradients)
        means = {
            name: (jnp.maximum if name in LARGEST else jnp.add)(totals[1][name], value)
            for name, value in means.items()
        }
        return (summed, means), sampled

    def _apply_gradients(
        self, state: TrainState, gradients: Params, means: Means, limits: dict[str, Array]
    ) -> tuple[TrainState, Means]:
        norm = optax.tree.norm(gradients)
        made = jnp.isfinite(norm) & jnp.isfinite(means["policy/loss"])
        for name, (low, high) in limits.items():
            value = norm if name == "optim/grad_norm" else means[name]
            made &= (low <= value) & (value <= high)
        rate = self._optimizer.learning_rate(state.step)
        direction, opt_state = self._optimizer.direction(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(made, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        return TrainState(params, opt_state, state.step + 1), means | {
            "optim/grad_norm": norm,
            "optim/learning_rate": rate,
            "optim/skipped": 1.0 - made.astype(jnp.float32),
        }

    # --- small parts --------------------------------------------------------------------------------------------

    def _skipped(self, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        """An update without a token to learn from."""
        rate = float(self._optimizer.learning_rate(state.step))
        state = TrainState(state.params, state.opt_state, state.step + 1)
        return state, metrics | {"optim/skipped": 1.0, "optim/learning_rate": rate}

    def _prepared(self, params: Params, batch: TrainBatch) -> Float[np.ndarray, "rows time"]:
        self.prepared = self.log_probs(params, batch)
        return self.prepared

    def _in_model_dtype(self, params: Params) -> Params:
        same = all(leaf.dtype == self._dtype for leaf in jax.tree.leaves(params))
        return params if same else self._cast(params)

    def _placed(self, batch: TrainBatch) -> TrainBatch:
        return jax.device_put(batch, None if self._mesh is None else self._placement(_ROWS))

    def _placement(self, spec: PartitionSpec) -> NamedSharding:
        assert self._mesh is not None, "only called with a mesh"
        return NamedSharding(self._mesh, spec)

    def _spread(
        self, function: Callable, inputs: tuple, outputs: PartitionSpec | tuple
    ) -> Callable:
        """The function on each device's rows, with explicit sums over devices inside."""
        if self._mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )


def _cast(params: Params, *, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _zeros(params: Params) -> Params:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
