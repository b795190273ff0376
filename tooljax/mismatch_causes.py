"""Why engine and trainer disagree about the same tokens: weights that differ, and experiments of the trainer's own.

Weights first: hashes of what the sidecar serves, group by group, against those of the trainer's tensors. Then the
probes are scored again in the ways in which engines are known to go wrong. Whichever brings the two sides together
names the fault. None of it runs unless a gate has failed, except `truncation`, which runs once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from flax import nnx
from jaxtyping import Array, Float

from rollout_sidecar.protocol import ServedWeights
from tooljax.batch import TrainBatch
from tooljax.distributed import to_host
from tooljax.grpo.mismatch import measure
from tooljax.mismatch_scoring import TEMPERATURES, HeadValues, at_temperatures, head_values
from tooljax.model.decoder import DecoderConfig
from tooljax.model.hf_names import EMBEDDING, FINAL_NORM, HEAD, LAYER_NAMES
from tooljax.policy import Policy
from tooljax.update import Params

ROPE_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Bases that engines fall back to, or that neighbouring models have."""

TOP_K = (1, 2, 4, 5, 8, 10, 20, 40, 50, 64, 100)
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)

_GROUPS = {
    "embedding": ("embedding",),
    "attention q/k/v": ("wq", "wk", "wv", "bq", "bk", "bv"),
    "attention output": ("wo",),
    "mlp": ("w_gate", "w_up", "w_down"),
    "norms": ("attn_norm", "ffw_norm", "q_norm", "k_norm", "final_norm"),
    "head": ("head",),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_OWN_NAMES = {EMBEDDING: "embedding", FINAL_NORM: "final_norm", HEAD: "head"} | {
    hf_name: name for name, hf_name in LAYER_NAMES.items()
}


# --- weights --------------------------------------------------------------------------------------------------------


def group_of(tensor: str) -> str:
    """The group of a tensor, by its Hugging Face name."""
    in_layer = tensor.removeprefix("model.layers.").partition(".")[2]
    return _GROUP_OF.get(_OWN_NAMES.get(tensor) or _OWN_NAMES.get(in_layer, ""), "others")


def hashes(tensors: Iterable[tuple[str, jax.Array]]) -> dict[str, str]:
    """xxh3-128 of each tensor's bytes."""
    return {name: xxhash.xxh3_128_hexdigest(_bytes(array)) for name, array in tensors}


def weights_sentence(own: Mapping[str, str], served: ServedWeights) -> tuple[str, bool]:
    """How what a sidecar serves compares with the trainer's tensors, and whether that explains anything."""
    wrong = {name for name, digest in own.items() if served.hashes.get(name) != digest}
    wrong |= set(served.hashes) - set(own)
    pushed = "what was pushed to it" if wrong else "what its engine holds"
    wrong |= set(served.altered or ())
    if wrong:
        counts = Counter(map(group_of, sorted(wrong)))
        groups = ", ".join(f"{group} ({count} tensors)" for group, count in counts.most_common())
        return (
            f"Other weights: {pushed} differs from the trainer's in {groups}; the first is {min(wrong)}",
            True,
        )
    if served.altered is None:
        return (
            f"The {len(own)} tensors that were pushed to it are the trainer's to the byte; what its engine made of "
            "them it cannot tell",
            False,
        )
    return (
        f"The {len(own)} tensors that its engine holds are the trainer's to the byte: it computes differently",
        False,
    )


# --- experiments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One experiment: what the engine would be doing, and the mean KL if it did."""

    text: str
    mean_kl: float


class Probes:
    """The sampled tokens of a batch, which can be scored again and again.

    Args:
        policy: its structure, and the weights that it was loaded with.
        params: the weights that the sidecars should serve, in the model's dtype.
        batch: packed probes.
        rows_per_microbatch: rows that are computed at once.
        temperature: sampling.temperature.
    """

    def __init__(
        self,
        policy: Policy,
        params: Params,
        batch: TrainBatch,
        *,
        rows_per_microbatch: int,
        temperature: float,
    ):
        self._policy = policy
        self._params = params
        self._microbatches = batch.microbatches(rows_per_microbatch)
        self._temperature = temperature
        mask = np.asarray(batch.loss_mask)
        self.targets = np.asarray(batch.tokens)[mask]
        self.rollout_log_probs = np.asarray(batch.rollout_log_probs)[mask]
        self.first = (mask & ~np.roll(mask, 1, axis=1))[mask]
        """Of each token, whether it is the first one sampled in its turn."""

    def values(
        self,
        *,
        params: Params | None = None,
        cfg: DecoderConfig | None = None,
        head: Array | None = None,
        top_k: Iterable[float] = (),
        top_p: Iterable[float] = (),
    ) -> HeadValues:
        """Scores the tokens, with other weights, another config or another head if they are given."""
        params = self._params if params is None else params
        hidden = self._hidden(params, cfg or self._policy.shape)
        own = nnx.merge(self._policy.graphdef, params).head_weight()
        head = own if head is None else head
        return head_values(hidden, head, self.targets, self._temperature, [*top_k], [*top_p])

    def mean_kl(self, log_probs: Float[np.ndarray, " tokens"]) -> float:
        """Between the engine, and somebody who gives these log-probs."""
        return measure(log_probs, self.rollout_log_probs).mean_kl

    def truncation(self) -> tuple[float, str]:
        """How many standard errors the tokens are likelier than what is drawn from the whole distribution, and a
        sentence on what they could have been drawn from.

        Engines that report log-probs of the whole distribution hide a truncated support from every other comparison.
        The sum of log p + entropy over drawn tokens has mean 0, and its variance is known.
        """
        values = self.values()
        surplus = np.sum(values.log_probs.astype(np.float64) + values.entropy)
        spread = np.sqrt(np.sum(np.maximum(values.variance.astype(np.float64), 0.0)))
        z = float(surplus / max(spread, 1e-6))
        return z, (
            f"All {values.rank.size} sampled tokens are among the {int(values.rank.max()) + 1} likeliest (top_k?), and "
            f"none has more than {float(values.likelier.max()):.3f} of the probability above it (top_p?)"
        )

    def findings(self) -> list[Finding]:
        """Every experiment, the best first."""
        found = [
            *self._temperatures(),
            *self._supports(),
            *self._heads(),
            *self._computations(),
            *self._stale_weights(),
        ]
        return sorted(found, key=lambda finding: finding.mean_kl)

    # --- what engines do wrong ---

    def _temperatures(self) -> Iterator[Finding]:
        """The temperature that fits best, found by zooming in."""
        hidden = self._hidden(self._params, self._policy.shape)
        head = nnx.merge(self._policy.graphdef, self._params).head_weight()

        def kls(temperatures: np.ndarray) -> list[float]:
            columns = at_temperatures(hidden, head, self.targets, temperatures)
            return [self.mean_kl(column) for column in columns.T]

        configured, best, spread = self._temperature, self._temperature, 4.0
        for _ in range(3):
            grid = best * np.geomspace(1 / spread, spread, TEMPERATURES)
            best = float(grid[int(np.argmin(kls(grid)))])
            spread = spread ** (2 / (TEMPERATURES - 1))
        tried = np.full(TEMPERATURES, best)
        tried[:2] = configured, 1.0
        as_configured, at_1, fitted = kls(tried)[:3]
        yield Finding(
            f"the engine samples at sampling.temperature={configured:g}, and the trainer's own scoring is at another",
            as_configured,
        )
        if configured != 1:
            yield Finding(
                f"the engine samples at temperature 1 instead of sampling.temperature={configured:g}",
                at_1,
            )
        yield Finding(
            f"the engine samples at temperature {best:.2f} instead of sampling.temperature={configured:g}",
            # Nearly the same as one of those above, it would only blur what they say.
            fitted if fitted < 0.5 * min(as_configured, at_1) else as_configured,
        )

    def _supports(self) -> Iterator[Finding]:
        """Truncated sampling whose log-probs are those of the tokens that were kept."""
        plain = self.values()
        # Renormalised, a token's probability is what it was by the probability that was kept.
        kept = float(np.exp(np.min(plain.log_probs - self.rollout_log_probs)))
        top_k = (*TOP_K, int(plain.rank.max()) + 1)
        top_p = (*TOP_P, min(max(kept - 1e-5, 0.01), 1.0))
        values = self.values(top_k=top_k, top_p=top_p)
        for k, log_probs in zip(top_k, values.top_k.T, strict=True):
            yield Finding(f"the engine samples with top_k={k}", self.mean_kl(log_probs))
        for p, log_probs in zip(top_p, values.top_p.T, strict=True):
            yield Finding(f"the engine samples with top_p={p:.2f}", self.mean_kl(log_probs))
        yield Finding(
            "the engine rounds its logits to bfloat16 (no float32 head)",
            self.mean_kl(values.rounded),
        )

    def _heads(self) -> Iterator[Finding]:
        """Another matrix as LM head."""
        policy = nnx.merge(self._policy.graphdef, self._params)
        if not self._policy.shape.tied_head:
            yield self._try(
                "the engine's LM head is the embedding (tied)", head=policy.embedding[...]
            )
            return
        loaded = nnx.merge(self._policy.graphdef, self._policy.params).embedding[...]
        if not _equal(loaded, policy.embedding[...]):
            yield self._try(
                "the engine's LM head is still the one that was loaded: tied, it must follow the embedding",
                head=loaded,
            )

    def _computations(self) -> Iterator[Finding]:
        """The same weights in another model."""
        cfg = self._policy.shape
        for theta in ROPE_THETAS:
            if theta != cfg.rope_theta:
                yield self._try(
                    f"the engine's rotary base (rope_theta) is {theta:g} instead of {cfg.rope_theta:g}",
                    cfg=replace(cfg, rope_theta=theta),
                )
        if cfg.rope_scaling is not None:
            yield self._try(
                "the engine leaves out rope_scaling", cfg=replace(cfg, rope_scaling=None)
            )
        yield self._try(
            "the engine leaves out the final norm's scale",
            params=self._changed(lambda name, x: jnp.ones_like(x) if name == "final_norm" else x),
        )
        if cfg.qkv_bias:
            biases = ("bq", "bk", "bv")
            yield self._try(
                "the engine leaves out the biases of q, k and v",
                params=self._changed(lambda name, x: jnp.zeros_like(x) if name in biases else x),
            )

    def _stale_weights(self) -> Iterator[Finding]:
        """Weights that no push has reached."""
        loaded = {_name(path): leaf for path, leaf in _leaves(self._policy.params)}
        moved = {
            name
            for path, leaf in _leaves(self._params)
            if not _equal(leaf, loaded[name := _name(path)])
        }
        if not moved:
            return
        yield self._try(
            "the engine's weights are all as they were loaded: no push reached it",
            params=self._policy.params,
        )
        for group, names in _GROUPS.items():
            stale = moved.intersection(names)
            if stale:
                yield self._try(
                    f"the engine's {group} weights are as they were loaded: pushes did not reach them",
                    params=self._changed(
                        lambda name, x, stale=stale: loaded[name] if name in stale else x
                    ),
                )

    # --- small parts ---

    def _try(self, text: str, **changes: Any) -> Finding:
        return Finding(text, self.mean_kl(self.values(**changes).log_probs))

    def _changed(self, change: Callable[[str, Array], Array]) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: change(_name(path), leaf), self._params
        )

    def _hidden(self, params: Params, cfg: DecoderConfig) -> Float[Array, "tokens embed"]:
        """The states that predict the sampled tokens."""
        forward = _forward(self._policy.graphdef, cfg)
        parts = []
        for microbatch in self._microbatches:
            rows, columns = np.nonzero(microbatch.loss_mask)
            if rows.size:
                parts.append(forward(params, microbatch)[rows, columns - 1])
        return jnp.concatenate(parts)


@cache
def _forward(graphdef: nnx.GraphDef, cfg: DecoderConfig) -> Callable[..., Array]:
    """The final hidden states of a batch, computed as `cfg` says."""

    @jax.jit
    def forward(params: Params, batch: TrainBatch) -> Array:
        decoder = nnx.merge(graphdef, params)
        decoder.cfg = cfg
        return decoder.hidden(
            jnp.asarray(batch.tokens), jnp.asarray(batch.positions), jnp.asarray(batch.segment_ids)
        )

    return forward


def _bytes(array: jax.Array) -> memoryview:
    return np.array(to_host(array), copy=True, order="C").reshape(-1).view(np.uint8).data


def _leaves(params: Params) -> list[tuple[Any, Array]]:
    return jax.tree_util.tree_leaves_with_path(params)


def _name(path: Any) -> str:
    """The last name on a weight's path: "wq", "final_norm"."""
    keys = [str(getattr(key, "key", "")) for key in path]
    return next(key for key in reversed(keys) if key in _GROUP_OF)


def _equal(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and bool(jnp.array_equal(a, b))
