"""Compiles the programs of an update for devices that need not be there, and says what each needs.

Weights, moments and batch are abstract: shapes, dtypes and placements, as a run would have them. The programs are those
of `tooljax.update.Updater`, kernels included.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_kernels.token_log_probs import gpu, hopper, tpu
from tooljax.batch import TrainBatch
from tooljax.compile.chips import Topology
from tooljax.compile.hlo import Traffic, traffic
from tooljax.compile.shapes import shape_of
from tooljax.config import Config
from tooljax.guards import Guard
from tooljax.lora import abstract_adapters, lora_of
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.model.flops import executed_flops, forward_flops
from tooljax.objective import make_objective
from tooljax.policy import Policy, make_updater
from tooljax.sharding import HOST_MEMORY, Layout, make_mesh, shardings
from tooljax.update import TrainState


class DoesNotFit(RuntimeError):
    """The compiler found no room for a program."""


@dataclass(frozen=True)
class Program:
    """What one program of an update takes on one device, for a full microbatch where it takes one."""

    name: str
    argument_bytes: float
    output_bytes: float
    """Without those that take the place of arguments."""
    temporary_bytes: float
    peak_bytes: float
    """Arguments, outputs and temporaries that are there at once."""
    held_bytes: float
    """What the trainer holds beside it: weights and moments that it does not take."""
    flops: float
    """Of its products (`tooljax.model.flops`): what is computed again is counted again."""
    xla_flops: float
    """As XLA counts them: the body of a loop once, a kernel as it says itself."""
    traffic: Traffic
    compile_s: float

    @property
    def needed_bytes(self) -> float:
        """Of the device's memory while it runs."""
        return self.peak_bytes + self.held_bytes


@dataclass(frozen=True)
class Compiled:
    """The programs of a config's update, and what they were compiled for."""

    programs: list[Program]
    shape: DecoderConfig
    layout: Layout
    devices: int
    weights: int
    """Number of them."""
    tokens: int
    """Of a microbatch, padding and all."""
    row_length: int


def compile_update(config: Config, topology: Topology) -> Compiled:
    """Compiles what a step of this config runs, for its longest rows.

    ValueError: a config that does not fit the topology or the model. DoesNotFit: the compiler says that a program is
    too large for a device.
    """
    mesh = make_mesh(**config.mesh.sizes, devices=topology.devices)
    # One device that is here has no mesh, as in a run: the programs are the very ones that a run compiles.
    here = mesh.size == 1 and not topology.is_tpu
    layout = Layout(None if here else mesh, config.model.attention)
    shape = shape_of(config.model.path, config.model.dtype)
    graphdef, params = _abstract_weights(shape, layout)
    policy = Policy(graphdef, params, shape, config.model.path, layout)
    if lora := lora_of(config.lora):
        policy = replace(policy, adapters=abstract_adapters(shape, lora, layout))
        shape = replace(shape, lora=lora)
    updater = make_updater(
        config, policy, total_updates=config.run.steps, learning_rate=config.optimizer.learning_rate
    )
    state = updater.abstract(policy.trained)
    batch = _microbatch(config, layout)
    limits = Guard(config.guard).update_limits()
    length = config.batch.row_lengths[-1]
    programs = []
    with _traced_for(topology):
        for name, lowered in updater.lowered(state, batch, limits).items():
            start = time.perf_counter()
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise DoesNotFit(f"{name}: {str(error).splitlines()[0]}") from None
            seconds = time.perf_counter() - start
            programs.append(
                _program(
                    name,
                    compiled,
                    held=_held(name, state, params, config),
                    flops=_flops(name, config, shape) / mesh.size,
                    chunks=_loss_chunks(config, shape, layout),
                    seconds=seconds,
                    on_tpu=topology.is_tpu,
                )
            )
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    tokens = config.batch.rows_per_microbatch * length
    return Compiled(programs, shape, layout, mesh.size, count, tokens, length)


@contextlib.contextmanager
def _traced_for(topology: Topology) -> Iterator[None]:
    """Kernels are chosen when a program is traced, by the device that it is for."""
    if not topology.is_tpu:
        yield
        return
    with tpu.compiled_for(tpu.Device(topology.kind)):
        yield


# --- abstract arguments ---------------------------------------------------------------------------------------------


def _abstract_weights(shape: DecoderConfig, layout: Layout) -> tuple[nnx.GraphDef, Any]:
    abstract = nnx.eval_shape(lambda: Decoder(shape, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)
    if layout.mesh is None:
        return graphdef, params
    placed = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        params,
        shardings(params, layout.mesh),
    )
    return graphdef, placed


def _microbatch(config: Config, layout: Layout) -> TrainBatch:
    """One as the objective prepares it, so that it has the very fields of a run's."""
    rows, length, grpo = config.batch.rows_per_microbatch, config.batch.row_lengths[-1], config.grpo
    ints, floats = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
    # A token each to learn from and to see: with none, nothing would be prepared.
    mask = np.zeros((rows, length), bool)
    mask[:, 1] = True
    segments = ints.copy()
    segments[:, :2] = 1
    owners = np.where(segments == 1, np.arange(rows, dtype=np.int32)[:, None], np.int32(-1))
    batch = TrainBatch(ints, ints, segments, mask, floats, floats, sequence_ids=owners)
    if config.batch.shared_prompts == "auto":  # takes more than a batch that shares nothing
        batch = replace(batch, trunk_ids=segments)
    if grpo.kl_coef > 0:
        batch = replace(batch, ref_log_probs=floats)
    in_reward = grpo.kl_coef > 0 and grpo.kl_in == "reward"
    if in_reward or (grpo.updates_per_batch > 1 and grpo.rollout_correction != "bypass"):
        batch = replace(batch, old_log_probs=floats)
    prepared, _ = make_objective(config).prepare(batch, lambda batch: floats)
    place = layout.mesh and jax.sharding.NamedSharding(layout.mesh, layout.spec("batch", "time"))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        prepared.microbatches(rows)[0],
    )


# --- what a program takes -------------------------------------------------------------------------------------------


def _program(
    name: str,
    compiled: Any,
    *,
    held: float,
    flops: float,
    chunks: int,
    seconds: float,
    on_tpu: bool,
) -> Program:
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    whole = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
    return Program(
        name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=outputs,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=_peak(memory, whole) if on_tpu else whole,
        held_bytes=held,
        flops=flops,
        xla_flops=float(cost.get("flops", 0.0)),
        traffic=traffic(compiled.as_text(), unknown_trips=chunks),
        compile_s=seconds,
    )


def _peak(memory: Any, whole: float) -> float:
    """Of a TPU's memory. The sizes of temporaries include what is in VMEM, this does not; CPUs leave them out of it."""
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    # The peak counts what programs take of the host's memory; the whole does not.
    host = getattr(memory, "host_argument_size_in_bytes", 0)
    return whole if host or not peak else peak


def _held(name: str, state: TrainState, loaded: Any, config: Config) -> float:
    """Bytes on a device of what is there while a program runs and that it does not take: of the state, of the weights
    as they were loaded (the reference), and of those that the next push is compared with."""
    weights, kept, reference = map(_bytes, (state.params, state.opt_state, loaded))
    delta = config.weights.mode == "delta" and config.model.dtype == "bfloat16"
    base = reference if delta else 0.0
    if config.lora.rank:  # Log-probs and gradients take the weights that the adapters stand beside.
        rounded = weights / 2 if config.model.dtype == "bfloat16" else 0.0
        return {
            "cast": kept + reference + base,
            "log-probs": weights + kept + base,
            "gradients": (weights if rounded else 0.0) + kept + base,
            "apply": rounded + reference + base,
        }[name]
    return {
        # The log-probs may be the reference's, or the state's.
        "log-probs": weights + kept + base,
        "gradients": kept + reference + base,
        "apply": reference + base,
    }[name]


def _bytes(tree: Any) -> float:
    """On one device, without what is in the host's memory."""

    def part(x: Any) -> float:
        if x.sharding is None:
            return math.prod(x.shape) * x.dtype.itemsize
        here = x.sharding.memory_kind != HOST_MEMORY
        return here * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return float(sum(map(part, jax.tree.leaves(tree))))


def _flops(name: str, config: Config, shape: DecoderConfig) -> float:
    """Of a whole microbatch of rows that one trajectory fills, all of it in the loss: the most that it can take."""
    rows, length = config.batch.rows_per_microbatch, config.batch.row_lengths[-1]
    tokens, pairs = rows * length, rows * length * (length + 1) // 2
    if name == "log-probs":
        return forward_flops(shape, tokens, pairs, tokens)
    if name == "gradients":
        return executed_flops(shape, tokens, pairs, tokens, remat=config.model.remat)
    return 0.0


def _loss_chunks(config: Config, shape: DecoderConfig, layout: Layout) -> int:
    """Of a device's tokens in a full microbatch: the loss goes through them in chunks, as many as are valid."""
    tokens = config.batch.rows_per_microbatch * config.batch.row_lengths[-1]
    mine = tokens // (layout.ways("batch") * layout.ways("time"))
    vocab = shape.vocab // layout.ways("vocab")
    if layout.platform in ("gpu", "cuda"):
        return -(-mine // gpu.default_chunk_tokens(vocab, hopper.Tiles()))
    return -(-mine // tpu.default_chunk_tokens(vocab))
