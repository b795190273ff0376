"""A tiny decoder, items to train it on, and the slow float64 loss that updates are compared with."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tooljax.batch import PackItem
from tooljax.grpo.policy_losses import PolicyLoss
from tooljax.grpo.preparation import Preparation
from tooljax.model.decoder import Decoder, DecoderConfig
from tooljax.objective import GrpoObjective
from tooljax.optimizer import make_optimizer
from tooljax.update import TrainState, Updater

CONFIG = DecoderConfig(
    family="qwen2",
    vocab=19,
    embed=8,
    layers=2,
    q_heads=2,
    kv_heads=1,
    head_dim=4,
    ffw=12,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tied_head=True,
    max_positions=64,
    qkv_bias=True,
    dtype="float32",
)


@cache
def model(dtype: str = "float32") -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(Decoder(replace(CONFIG, dtype=dtype), rngs=nnx.Rngs(0)))


@cache
def new_updater(*, learning_rate: float = 0.01, kl_coef: float = 0.0, **changes) -> Updater:
    """One updater for each setting: tests share what it compiles."""
    optimizer = make_optimizer(
        learning_rate=learning_rate,
        warmup_steps=0,
        schedule="constant",
        total_steps=10,
        weight_decay=0.0,
        b1=0.9,
        b2=0.99,
        eps=1e-8,
        clip_norm=1e9,
        **{name: changes.pop(name) for name in ("rounding", "seed", "offload") if name in changes},
    )
    settings = {
        "dtype": "float32",
        "temperature": 1.0,
        "objective": GrpoObjective(
            Preparation(PolicyLoss("vanilla", clip_low=0.2, clip_high=0.3)), kl_coef
        ),
        "rows_per_microbatch": 1,
        "remat": "none",
    } | changes
    graphdef = settings.pop("graphdef", None) or model(settings["dtype"])[0]
    return Updater(graphdef, optimizer, **settings)


def new_items(loss_tokens=(1, 2, 3, 4), seed: int = 0) -> list[PackItem]:
    """Trajectories of 12 tokens: 5 of prompt, then as many loss tokens as asked, each after an observation token."""
    rng = np.random.default_rng(seed)
    items = []
    for count in loss_tokens:
        mask = [False] * 12
        for i in range(count):
            mask[5 + i + i // 2] = True
        items.append(
            PackItem(
                token_ids=rng.integers(0, CONFIG.vocab, 12).tolist(),
                loss_mask=mask,
                advantage=float(rng.normal()),
                rollout_log_probs=np.where(mask, -rng.uniform(1.0, 4.0, 12), 0.0).tolist(),
            )
        )
    return items


def changed(state: TrainState) -> dict[str, np.ndarray]:
    """Copies of the weights by path: a state's arrays are consumed by the next update."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {jax.tree_util.keystr(path): np.array(value) for path, value in leaves}


def gradient(updater: Updater, params, batch, loss: Any = "grpo") -> dict[str, np.ndarray]:
    """The accumulated gradient, read from Adam's first moment after one step: mu = (1 - b1) gradient."""
    state, _ = updater.update(updater.init(params), batch, loss=loss)
    mu = state.opt_state.mu
    leaves = jax.tree_util.tree_leaves_with_path(mu)
    return {jax.tree_util.keystr(path): np.array(value) / 0.1 for path, value in leaves}


@jax.jit
def all_logits(params, ids):
    """Logits of trajectories that are not packed: one a row."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return nnx.merge(model()[0], params).logits(ids, positions, jnp.ones_like(ids))


def slow_log_probs(params, items: list[PackItem], temperature: float = 1.0) -> np.ndarray:
    """Log-probs of each trajectory on its own [item time], softmax in float64."""
    ids = np.asarray([item.token_ids for item in items], np.int32)
    logits = np.asarray(all_logits(params, ids), np.float64) / temperature
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    out = np.zeros(ids.shape)
    out[:, 1:] = np.take_along_axis(log_softmax[:, :-1], ids[:, 1:, None], axis=2)[..., 0]
    return np.where([item.loss_mask for item in items], out, 0.0)


def slow_loss(per_item, items, *, old=None, ref=None, kl_coef=0.0) -> float:
    """GRPO's loss in float64, one token after the other."""
    total, tokens = 0.0, 0
    for i, (log_probs, item) in enumerate(zip(per_item, items, strict=True)):
        for t in np.flatnonzero(item.loss_mask):
            before = log_probs[t] if old is None else old[i][t]
            ratio = np.exp(log_probs[t] - before)
            clipped = min(max(ratio, 0.8), 1.3)
            total -= min(ratio * item.advantage, clipped * item.advantage)
            if ref is not None:
                d = ref[i][t] - log_probs[t]
                total += kl_coef * (np.exp(d) - 1 - d)
            tokens += 1
    return total / tokens
