"""The GRPO family against verl's published formulas, sequence after sequence in float64: values and gradients.

The loss is the objective's own, with log-probs in place of a decoder; gradients are compared with central differences
of the float64 loss, in which what the paper holds constant is held constant.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerance import Tolerance
from tooljax.batch import PackItem, pack, unpack
from tooljax.grpo.kl import kl_estimate
from tooljax.grpo.policy_losses import PolicyLoss
from tooljax.grpo.preparation import Preparation
from tooljax.objective import GrpoObjective
from tooljax.sampled import Sampled

EXACT = Tolerance(rtol=1e-6, atol=1e-6)
LOW, HIGH, DUAL = 0.2, 0.3, 3.0
LENGTHS = (1, 4, 2, 7, 3)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def clipped(ratio, a):
    return max(-a * ratio, -a * min(max(ratio, 1 - LOW), 1 + HIGH))


def slow_tokens(mode, x, held, old, a) -> list:
    """Losses of one sequence's tokens at log-probs x; `held` are the log-probs where the paper stops gradients."""
    ratio, held_ratio = np.exp(np.clip(x - old, -20, 20)), np.exp(np.clip(held - old, -20, 20))
    n = len(x)
    if mode == "vanilla":
        found = [clipped(r, a) for r in ratio]
        return [min(loss, -a * DUAL) if a < 0 else loss for loss in found]
    if mode == "gspo":
        mean = sum(held - old) / n
        return [clipped(np.exp(min(x[t] - held[t] + mean, 10.0)), a) for t in range(n)]
    if mode == "geo_mean":
        sign = np.sign(a)
        logs = x - old
        bounded = sign * np.minimum(sign * logs, sign * np.clip(logs, -LOW, HIGH))
        return [-a * np.exp(sum(bounded) / n)] * n
    if mode == "cispo":
        return [-min(max(held_ratio[t], 1 - LOW), 1 + HIGH) * a * x[t] for t in range(n)]
    if mode == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return [-a * sigmoid(tau * (r - 1)) * 4 / tau for r in ratio]
    assert mode == "gpg"
    return [-a * value for value in x]


def aggregated(kind, losses, norm) -> float:
    """verl's agg_loss with one data-parallel rank."""
    sums = [sum(tokens) for tokens in losses]
    if kind == "token-mean":
        return sum(sums) / sum(map(len, losses))
    if kind == "seq-mean-token-sum":
        return sum(sums) / len(losses)
    if kind == "seq-mean-token-mean":
        return sum(s / len(tokens) for s, tokens in zip(sums, losses, strict=True)) / len(losses)
    return sum(sums) / len(losses) / norm


class World:
    """Sequences of random log-probs under the policy, the old one, the engine and a reference."""

    def __init__(self, spread=0.5, seed=0):
        rng = np.random.default_rng(seed)
        self.advantage = np.array([0.7, -1.2, 1.5, 0.4, -0.6])
        draw = [-rng.uniform(0.3, 3.0, n) for n in LENGTHS]
        self.now = [x.astype(np.float32).astype(np.float64) for x in draw]
        # Far enough from each other, and from the bounds of clips, for central differences.
        self.old, self.rollout, self.ref = (
            [
                (x + rng.uniform(-spread, spread, len(x))).astype(np.float32).astype(np.float64)
                for x in self.now
            ]
            for _ in range(3)
        )

    def batch(self, *, old=True, ref=False, row_length=16):
        items = [
            PackItem([1, 2, *[3] * n], [False, False, *[True] * n], a, [0.0, 0.0, *rollout])
            for n, a, rollout in zip(LENGTHS, self.advantage, self.rollout, strict=True)
        ]
        batch = pack(items, row_lengths=(row_length,), rows_multiple=1)
        return batch.with_log_probs(
            old=self.laid(self.old, batch) if old else None,
            ref=self.laid(self.ref, batch) if ref else None,
        )

    def laid(self, values, batch) -> np.ndarray:
        out = np.zeros(batch.tokens.shape, np.float32)
        for value, (row, start, length) in zip(values, batch.placements, strict=True):
            out[row, start + 2 : start + length] = value
        return out

    def found(self, objective, batch, **options):
        """The objective's loss, and its gradient by sequence."""
        now = self.laid(self.now, batch)
        prepared = jax.device_put(objective.prepare(batch, lambda _: now, **options)[0])

        def loss(log_probs):
            sampled = Sampled(log_probs, jnp.zeros_like(log_probs))
            count = jnp.float32(prepared.loss_tokens)
            return objective(sampled, prepared, count, temperature=1.0, remat="none")[0]

        value, slope = jax.value_and_grad(loss)(jnp.asarray(now))
        return float(value), [cut[2:] for cut in unpack(slope, batch)]

    def slopes(self, loss):
        """Central differences of a float64 loss of (log-probs by sequence, those that are held constant)."""
        step, out = 1e-6, [np.zeros(n) for n in LENGTHS]
        for i, n in enumerate(LENGTHS):
            for t in range(n):
                values = []
                for sign in (1, -1):
                    moved = [x.copy() for x in self.now]
                    moved[i][t] += sign * step
                    values.append(loss(moved, self.now))
                out[i][t] = (values[0] - values[1]) / (2 * step)
        return out

    def check(self, objective, batch, loss, **options):
        value, slope = self.found(objective, batch, **options)
        assert value == pytest.approx(loss(self.now, self.now), rel=1e-6, abs=1e-6)
        for found, expected in zip(slope, self.slopes(loss), strict=True):
            np.testing.assert_allclose(found, expected, **EXACT)


def make(mode="vanilla", aggregation="token-mean", **options) -> GrpoObjective:
    names = ("kl_coef", "kl_loss_type")
    outer: dict[str, Any] = {"kl_coef": 0.0}
    outer |= {k: v for k, v in options.items() if k in names}
    inner: dict[str, Any] = {k: v for k, v in options.items() if k not in names}
    dual = DUAL if mode == "vanilla" else 0.0
    policy = PolicyLoss(mode, clip_low=LOW, clip_high=HIGH, clip_dual=dual)
    return GrpoObjective(Preparation(policy, aggregation, **inner), **outer)


def slow_loss(world, mode, aggregation, norm, x, held) -> float:
    losses = [
        slow_tokens(mode, *each) for each in zip(x, held, world.old, world.advantage, strict=True)
    ]
    return aggregated(aggregation, losses, norm)


@pytest.mark.parametrize("mode", ["vanilla", "cispo", "sapo", "gpg"])
@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
def test_token_losses_and_aggregations(mode, aggregation):
    world = World()
    objective = make(mode, aggregation, norm=5.0)
    world.check(objective, world.batch(), partial(slow_loss, world, mode, aggregation, 5.0))


@pytest.mark.parametrize("mode", ["gspo", "geo_mean"])
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_losses_of_one_ratio_a_sequence(mode, spread):
    """The gradient is that of the paper's loss, which has one term a sequence."""
    world = World(spread, seed=3)

    def paper(x, held) -> float:
        terms = []
        for now, old, a in zip(x, world.old, world.advantage, strict=True):
            if mode == "gspo":
                terms.append(clipped(np.exp(np.mean(now - old)), a))
            else:
                terms.append(slow_tokens(mode, now, now, old, a)[0])
        return sum(terms) / len(terms)

    aggregation = "seq-mean-token-mean"
    world.check(make(mode, aggregation), world.batch(), paper)
    # And token by token it is what verl writes.
    written = partial(slow_loss, world, mode, aggregation, 1.0)
    assert written(world.now, world.now) == pytest.approx(paper(world.now, world.now), abs=1e-12)


def test_the_dual_clip_bounds_what_a_bad_token_costs():
    world = World(2.0, seed=1)
    loss = partial(slow_loss, world, "vanilla", "token-mean", 1.0)
    ratios = np.concatenate([np.exp(x - o) for x, o in zip(world.now, world.old, strict=True)])
    bad = np.repeat(world.advantage, LENGTHS) < 0
    assert (ratios[bad] > DUAL).any()
    world.check(make(), world.batch(), loss)


def covariance(world) -> list[np.ndarray]:
    a = np.repeat(world.advantage, LENGTHS)
    x = np.concatenate(world.now)
    return np.split((a - a.mean()) * (x - x.mean()), np.cumsum(LENGTHS)[:-1])


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    world = World(seed=5)
    cov = covariance(world)
    # 17 tokens, 0.2 of them: the three highest
    bound = np.sort(np.concatenate(cov))[-3]

    def loss(x, held) -> float:
        losses = [
            [
                -a * np.exp(v - o) + (0.7 * abs(v - o) if c >= bound else 0.0)
                for v, o, c in zip(now, old, own, strict=True)
            ]
            for now, old, a, own in zip(x, world.old, world.advantage, cov, strict=True)
        ]
        return aggregated("token-mean", losses, 1.0)

    world.check(make("kl_cov", cov_fraction=0.2, kl_cov_coef=0.7), world.batch(), loss)


def test_clip_cov_takes_gradient_and_loss_of_tokens_between_its_bounds():
    world = World(seed=5)
    cov = covariance(world)
    low, high = np.quantile(np.concatenate(cov), [0.3, 0.8])

    def loss(x, held) -> float:
        losses = []
        for i, (now, old, a) in enumerate(zip(x, world.old, world.advantage, strict=True)):
            row = []
            for t, (v, o) in enumerate(zip(now, old, strict=True)):
                before = np.exp(held[i][t] - o)
                is_clipped = before > 1 + HIGH if a > 0 else before < 1 - LOW
                gone = low < cov[i][t] < high and not is_clipped
                row.append(0.0 if gone else clipped(np.exp(v - o), a))
            losses.append(row)
        assert any(0.0 in row for row in losses)
        return aggregated("token-mean", losses, 1.0)

    # A share of 1 takes every candidate: nothing is drawn.
    objective = make("clip_cov", cov_fraction=1.0, clip_cov_low=low, clip_cov_high=high)
    world.check(objective, world.batch(), loss)


def test_clip_cov_draws_as_many_as_it_may_the_same_ones_each_time():
    world = World(seed=5)
    objective = make("clip_cov", cov_fraction=0.2, clip_cov_low=-9.0, clip_cov_high=9.0)
    drawn = []
    for row_length in (16, 16, 9, 64):
        batch = world.batch(row_length=row_length)
        now = world.laid(world.now, batch)
        weights = objective.prepare(batch, lambda _, now=now: now)[0].token_values["weight"]
        drawn.append(np.concatenate([cut[2:] for cut in unpack(weights, batch)]))
    # int(0.2 x 17) = 3 of the tokens
    assert np.sum(drawn[0] == 0) == 3
    # However they are packed
    for other in drawn[1:]:
        np.testing.assert_array_equal(drawn[0], other)


KL = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.minimum(np.exp(np.clip(d, -20, 20)) - 1 - np.clip(d, -20, 20), 10),
    "abs": abs,
}
SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", [*KL, *SAME])
@pytest.mark.parametrize("straight_through", [False, True])
def test_kl_estimates_and_their_straight_through_forms(kind: str, straight_through):
    d = np.array([-1.3, -0.2, 0.0, 0.4, 2.1, 2.9])
    log_probs = np.array([-2.0, -1.0, -0.5, -3.0, -4.0, -3.5])
    name = kind + "+" * straight_through
    estimate = KL[SAME[kind] if kind in SAME else kind]
    ref = jnp.asarray(log_probs + d, jnp.float32)
    now = jnp.asarray(log_probs, jnp.float32)
    np.testing.assert_allclose(kl_estimate(name, now, ref), estimate(d), **EXACT, err_msg=name)
    slope = jax.grad(lambda x: jnp.sum(kl_estimate(name, x, ref)))(now)
    # d is ref - log_probs, so the derivative by log_probs is that by -d.
    shape = KL["k2"] if straight_through else estimate
    differences = (shape(d - 1e-6) - shape(d + 1e-6)) / 2e-6
    there = d != 0 if kind == "abs" else np.full(d.shape, True)
    np.testing.assert_allclose(np.asarray(slope)[there], differences[there], **EXACT)


def test_an_unknown_estimate_is_refused():
    with pytest.raises(ValueError, match=r"there is no KL estimate 'full'; choose one of"):
        kl_estimate("full", jnp.zeros(1), jnp.zeros(1))


@pytest.mark.parametrize("kind", ["k1", "k3", "k3+"])
def test_the_kl_in_the_loss_is_aggregated_as_the_loss_is(kind):
    world = World()
    estimate = KL[kind.removesuffix("+")]

    def loss(x, held) -> float:
        losses = []
        for i, now in enumerate(x):
            policy = slow_tokens("vanilla", now, held[i], world.old[i], world.advantage[i])
            values = estimate(world.ref[i] - now)
            if kind.endswith("+"):
                slope, constant = ((world.ref[i] - y) ** 2 / 2 for y in (now, held[i]))
                values = slope + estimate(world.ref[i] - held[i]) - constant
            losses.append(policy + 0.4 * values)
        return aggregated("seq-mean-token-mean", losses, 1.0)

    objective = make("vanilla", "seq-mean-token-mean", kl_coef=0.1, kl_loss_type=kind)
    # The controller's coefficient of the step stands for the config's.
    world.check(objective, world.batch(ref=True), loss, kl_coef=0.4)


def test_the_entropy_bonus_is_taken_off_the_loss():
    world = World()
    batch = world.batch()
    entropy = np.where(batch.loss_mask, np.float32(1.5), np.float32(0))
    losses = []
    for coefficient in (0.0, 0.2):
        objective = make("gpg", "seq-mean-token-sum", entropy_coef=coefficient)
        now = world.laid(world.now, batch)
        prepared = jax.device_put(objective.prepare(batch, lambda _, now=now: now)[0])
        sampled = Sampled(jnp.asarray(now), jnp.asarray(entropy))
        losses.append(objective(sampled, prepared, jnp.float32(17), temperature=1.0, remat="none"))
    # 0.2 x 1.5 a token, 17 tokens over 5 sequences
    difference = float(losses[0][0] - losses[1][0])
    assert difference == pytest.approx(0.2 * 1.5 * 17 / 5, abs=1e-6)


def test_an_aggregation_of_old_releases_divides_by_no_number_of_sequences():
    world = World()
    new, old = (
        world.found(make("gpg", "seq-mean-token-sum-norm", norm=5.0, batch_mean=b), world.batch())
        for b in (True, False)
    )
    assert old[0] == pytest.approx(len(LENGTHS) * new[0], rel=1e-6)
