"""One update of the policy: log-probs, gradients of an objective, AdamW.

Log-probs are of the sampled tokens only, in float32, under the temperature they were sampled with; what is minimised is
in `tooljax.objective`. A batch is cut into microbatches of static shape, whose gradients add up: with denominators of
the whole batch, the cut does not change the result. Their number may differ from step to step without compiling anew.

Weights are in the model's dtype: what the loss uses, and what is sent to the engines. How those of bfloat16 take
steps that are too small for them is the optimizer's business (`tooljax.optimizer`). Adapters are float32, and rounded
for use.

On a mesh every program is of the whole arrays, and `tooljax.sharding` says where their parts are: weights, moments and
gradients where the rules put them, rows of a microbatch over `data` and `fsdp`. What an update says is the same on
every mesh, up to the order of sums.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from tooljax.batch import Batch, PackedBatch, TrainBatch
from tooljax.compilations import Compilations
from tooljax.lora import Adapted, is_adapters, trained_part, with_trained_part
from tooljax.model.decoder import Decoder
from tooljax.model.remat import Remat, check_remat
from tooljax.objective import LARGEST, Means, Objective, SftObjective
from tooljax.optimizer import Optimizer
from tooljax.sampled import Sampled, sampled_log_probs
from tooljax.sharding import HOST_MEMORY, ONE_DEVICE, Layout, shardings
from tooljax.train_state import Params as Params
from tooljax.train_state import TrainState as TrainState
from tooljax.train_state import first_state, made_in_place, placement
from tooljax.work import Work

Loss = Literal["grpo", "sft"]
Metrics = dict[str, float]


class Frozen(NamedTuple):
    """What adapters are trained beside."""

    graphdef: nnx.GraphDef
    """Of a decoder with adapters."""
    base: Params
    """Its other weights, in the model's dtype. No update changes them."""
    adapters: Params
    """As they start: their shapes and placements are wanted."""


class Updater:
    """Compiles once, then updates, on the layout's devices."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer,
        *,
        dtype: str,
        temperature: float,
        objective: Objective,
        rows_per_microbatch: int,
        remat: Remat,
        layout: Layout = ONE_DEVICE,
        frozen: Frozen | None = None,
    ):
        if rows_per_microbatch % layout.ways("batch"):
            raise ValueError(
                f"batch.rows_per_microbatch={rows_per_microbatch} does not divide over the {layout.ways('batch')} "
                f"devices of mesh axes {' x '.join(layout.splits('batch'))}; set it to a multiple, or those axes to "
                "sizes that divide it"
            )
        self._graphdef = graphdef
        self._frozen = frozen
        self._optimizer = optimizer
        self._dtype = jnp.dtype(dtype)
        self._temperature = temperature
        self._objectives: dict[str, Objective] = {"grpo": objective, "sft": SftObjective()}
        self._rows = rows_per_microbatch
        check_remat(remat, layout)
        if optimizer.offload:
            layout.check_host_memory("optimizer.offload=True", "set optimizer.offload = False")
        self._remat: Remat = remat
        self.layout = layout
        """Where everything is."""
        self._cast = jax.jit(self._rounded)
        self._narrow = jax.jit(
            lambda x: jax.device_put(x, jax.memory.Space.Device).astype(self._dtype)
        )
        self._zeros = jax.jit(self._no_gradients)
        self._forward = jax.jit(self._forward_only)
        self._accumulate: dict[str, Callable] = {
            loss: jax.jit(partial(self._add_gradients, minimised), donate_argnums=0)
            for loss, minimised in self._objectives.items()
        }
        self._apply = jax.jit(self._apply_gradients, donate_argnums=0)
        self.compilations = Compilations(
            [self._cast, self._zeros, self._forward, self._apply, *self._accumulate.values()]
        )
        self.work = Work(layout.device, layout.mesh.size if layout.mesh else 1)
        self.seen: list[Sampled | None] = []
        """Of each microbatch of the last update, on the devices: the log-probs that its loss was made from. None for
        those without loss tokens."""
        self.prepared: Float[np.ndarray, "rows time"] | None = None
        """The log-probs that the objective asked for before the last update; None if it needed none."""

    # --- what the training loop calls ---------------------------------------------------------------------------

    def init(self, params: Params) -> TrainState:
        """The state before the first update. Copies `params`: they stay usable, for example as the reference."""
        return made_in_place(self._optimizer, self.layout, params)

    def abstract(self, params: Params) -> TrainState:
        """Shapes, dtypes and placements of a state, without making one."""
        state = jax.eval_shape(partial(first_state, self._optimizer), params)
        places = self.placement(state)
        if places is None:
            return state
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
        )

    def saved(self, state: TrainState) -> TrainState:
        """What a checkpoint must hold of a state: not the weights, where they are rounded master weights."""
        rounded = state.opt_state.master is not None
        return replace(state, params=None) if rounded else state

    def restored(self, saved: TrainState) -> TrainState:
        """The state of which that was saved."""
        if saved.params is not None:
            return saved
        params = jax.tree.map(self._narrow, saved.opt_state.master)
        if self.layout.mesh is not None:
            params = jax.device_put(params, shardings(params, self.layout.mesh))
        return replace(saved, params=params)

    def placement(self, state: TrainState) -> TrainState | None:
        """Where each array of a state is, which may be abstract; None if all are in the memory of one device."""
        return placement(state, self.layout, self._optimizer)

    def compute_params(self, state: TrainState) -> Params:
        """The trained weights in the model's dtype: what the loss uses, and what is sent to the engines; with adapters
        these alone, and merged on their way.

        Without adapters these are the very arrays of `state`, which the next update consumes.
        """
        return self._in_model_dtype(state.params)

    def log_probs(self, params: Params, batch: Batch) -> Any:
        """Log-probs [rows time] of the loss tokens under `params`, 0 elsewhere: old_log_probs or ref_log_probs of the
        batch. Of a batch of several row lengths, a list of them. `params` are a state's, or all of a decoder's."""
        compute = self._complete(self._in_model_dtype(params))
        if isinstance(batch, PackedBatch):
            return [self.log_probs(compute, group) for group in batch.groups]
        out = np.zeros(batch.tokens.shape, np.float32)
        shape = self._decoder(compute).cfg
        for i, microbatch in enumerate(batch.microbatches(self._rows)):
            if microbatch.loss_tokens:
                values = self._forward(compute, self.layout.put(microbatch, "batch", "time"))
                out[i * self._rows : (i + 1) * self._rows] = jax.device_get(values)
                self.work.add(shape, microbatch, backward=False)
        return out

    def update(
        self,
        state: TrainState,
        batch: Batch,
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
        compute = self._complete(self._in_model_dtype(state.params))
        objective = self._objectives[loss]
        batch, told = objective.prepare(batch, partial(self._prepared, compute), kl_coef=kl_coef)
        tokens = batch.loss_tokens
        if tokens == 0:
            return self._skipped(state, told)
        denominator = self.layout.put(np.float32(tokens))
        no_means = self.layout.put(dict.fromkeys(objective.metrics(batch), np.float32(0)))
        totals = self._zeros(state.params), no_means
        shape = self._decoder(compute).cfg
        for microbatch in batch.microbatches(self._rows):
            sampled = None
            if microbatch.loss_tokens:
                placed = self.layout.put(microbatch, "batch", "time")
                totals, sampled = self._accumulate[loss](totals, compute, placed, denominator)
                self.compilations.used_for(
                    microbatch.tokens.shape, shared_prompts=microbatch.trunk_ids is not None
                )
                self.work.add(shape, microbatch, backward=True)
            self.seen.append(sampled)
        bounds = jax.device_put(
            {name: np.asarray(pair, np.float32) for name, pair in limits.items()}
        )
        state, metrics = self._apply(state, *totals, bounds)
        return state, told | {name: float(x) for name, x in jax.device_get(metrics).items()}

    def lowered(
        self, state: TrainState, microbatch: TrainBatch, limits: Iterable[str] = ()
    ) -> dict[str, jax.stages.Lowered]:
        """The programs of an update in the order in which they run, traced for these arguments, which may be abstract.

        `microbatch` is one of a batch that GRPO's objective has prepared; `limits` are names, as for `update`.
        """

        def like(x: Any, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

        def scalar(*shape: int) -> jax.ShapeDtypeStruct:
            place = None if self.layout.mesh is None else self.layout.whole
            return jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), sharding=place)

        weights = self._complete(jax.tree.map(lambda x: like(x, self._dtype), state.params))
        gradients = jax.tree.map(lambda x: like(x, jnp.dtype(jnp.float32)), state.params)
        means = {name: scalar() for name in self._objectives["grpo"].metrics(microbatch)}
        bounds = {name: scalar(2) for name in limits}
        accumulate: Any = self._accumulate["grpo"]
        casts = any(x.dtype != self._dtype for x in jax.tree.leaves(state.params))
        return ({"cast": self._cast.lower(state.params)} if casts else {}) | {
            "log-probs": self._forward.lower(weights, microbatch),
            "gradients": accumulate.lower((gradients, means), weights, microbatch, scalar()),
            "apply": self._apply.lower(state, gradients, means, bounds),
        }

    # --- what is compiled ---------------------------------------------------------------------------------------

    @jax.named_scope("log_probs")
    def _forward_only(self, params: Params, batch: TrainBatch) -> Float[Array, "rows time"]:
        decoder = self._decoder(params)
        log_probs, _ = sampled_log_probs(decoder, batch, temperature=self._temperature)
        # Whole, so that every host can read them; so are those of the gradients' pass.
        return self.layout.pin(log_probs)

    @jax.named_scope("gradients")
    def _add_gradients(
        self,
        objective: Objective,
        totals: tuple[Params, Means],
        params: Params,
        batch: TrainBatch,
        denominator: Float[Array, ""],
    ) -> tuple[tuple[Params, Means], Sampled]:
        """Adds a microbatch's part of the gradient and of the metrics to what earlier ones gave."""

        def loss(trained: Params) -> tuple[Float[Array, ""], tuple[Means, Sampled]]:
            value, means, sampled = objective(
                self._decoder(with_trained_part(params, trained)),
                batch,
                denominator,
                temperature=self._temperature,
                remat=self._remat,
            )
            return value, (means, sampled)

        gradients, (means, sampled) = jax.grad(loss, has_aux=True)(trained_part(params))
        summed = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), totals[0], gradients)
        means = {
            name: (jnp.maximum if name in LARGEST else jnp.add)(totals[1][name], value)
            for name, value in means.items()
        }
        sampled = jax.tree.map(self.layout.pin, sampled)
        return (self._stored(summed), means), sampled

    @jax.named_scope("apply")
    def _apply_gradients(
        self, state: TrainState, gradients: Params, means: Means, limits: dict[str, Array]
    ) -> tuple[TrainState, Means]:
        norm = optax.tree.norm(gradients)
        made = jnp.isfinite(norm) & jnp.isfinite(means["policy/loss"])
        for name, (low, high) in limits.items():
            value = norm if name == "optim/grad_norm" else means[name]
            made &= (low <= value) & (value <= high)
        params, opt_state = self._optimizer.update(
            state.params, gradients, state.opt_state, step=state.step, norm=norm, made=made
        )
        return self._in_place(TrainState(params, opt_state, state.step + 1)), means | {
            "optim/grad_norm": norm,
            "optim/learning_rate": self._optimizer.learning_rate(state.step),
            "optim/skipped": 1.0 - made.astype(jnp.float32),
        }

    # --- small parts --------------------------------------------------------------------------------------------

    def _skipped(self, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        """An update without a token to learn from."""
        rate = float(self._optimizer.learning_rate(state.step))
        state = replace(state, step=state.step + 1)
        return state, metrics | {"optim/skipped": 1.0, "optim/learning_rate": rate}

    def _prepared(self, params: Params, batch: Batch) -> Any:
        self.prepared = self.log_probs(params, batch)
        return self.prepared

    def _in_model_dtype(self, params: Params) -> Params:
        same = all(leaf.dtype == self._dtype for leaf in jax.tree.leaves(params))
        return params if same else self._cast(params)

    def _complete(self, params: Params) -> Any:
        """All that a decoder is made of, given that, adapters alone or weights without adapters."""
        if self._frozen is None or isinstance(params, Adapted):
            return params
        if is_adapters(params):
            return Adapted(params, self._frozen.base)
        # By the same program, so that the policy and its reference are rounded alike.
        return Adapted(self._in_model_dtype(self._zeros(self._frozen.adapters)), params)

    def _decoder(self, params: Any) -> Decoder:
        if isinstance(params, Adapted):
            assert self._frozen is not None, "adapters are trained beside something"
            decoder = nnx.merge(self._frozen.graphdef, params.adapters, params.base)
        else:
            decoder = nnx.merge(self._graphdef, params)
        decoder.layout = self.layout
        return decoder

    @jax.named_scope("cast")
    def _rounded(self, params: Params) -> Params:
        return self._stored(jax.tree.map(lambda x: x.astype(self._dtype), params))

    def _no_gradients(self, params: Params) -> Params:
        return self._stored(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))

    def _stored(self, params: Params) -> Params:
        """Inside what is compiled: weights, or what mirrors them, where weights are stored."""
        mesh = self.layout.mesh
        return params if mesh is None else jax.tree.map(_placed, params, shardings(params, mesh))

    def _in_place(self, state: TrainState) -> TrainState:
        places = self.placement(state)
        if places is None:
            return state
        return jax.tree.map(
            # What is in the host's memory has been put there, part by part.
            lambda x, place: x if place.memory_kind == HOST_MEMORY else _placed(x, place),
            state,
            places,
        )


_placed = jax.lax.with_sharding_constraint
