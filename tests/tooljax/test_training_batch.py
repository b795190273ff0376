"""What a step does between rollouts and update: which trajectories count, and for how much."""

import msgspec
import numpy as np
import pytest
from training_batch_cases import config, make_batch, trajectory

from rollout_sidecar.protocol import (
    InteractionReply,
    TokenStream,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from tolerance import Tolerance
from tooljax.batch import unpack
from tooljax.grpo.estimators import whitened
from tooljax.training_batch import (
    BASELINE,
    NO_BASELINE,
    UNTRAINABLE,
    with_greedy,
    with_kl_in_reward,
)


def test_advantages_reach_exactly_the_sampled_tokens():
    groups = [[trajectory(1.0), trajectory(0.0, sampled=1)]]
    batch, metrics, _ = make_batch(config(scale_by_std=False), groups)
    # rewards 1 and 0: mean 0.5, so advantages 0.5 and -0.5
    (row, start, _), (other_row, other_start, _) = batch.placements
    np.testing.assert_array_equal(batch.advantages[row, start : start + 6], [0, 0, 0, 0.5, 0.5, 0])
    np.testing.assert_array_equal(
        batch.advantages[other_row, other_start : other_start + 5], [0, 0, 0, -0.5, 0]
    )
    assert metrics["perf/loss_tokens"] == 3
    assert metrics["reward/zero_variance_group_frac"] == 0


def test_skipped_groups_leave_the_denominator():
    """Pain point 20: equal rewards, up to rounding, teach nothing and must not dilute the others."""
    groups = [
        [trajectory(0.1 + 0.2), trajectory(0.3)],
        [trajectory(1.0), trajectory(0.0)],
    ]
    batch, metrics, _ = make_batch(config(), groups)
    assert metrics["reward/zero_variance_group_frac"] == 0.5
    assert batch.loss_tokens == 4
    kept, _, _ = make_batch(config(zero_variance="keep"), groups)
    assert kept.loss_tokens == 8
    assert np.sum(kept.advantages[kept.loss_mask] == 0) == 4


def test_a_trajectory_that_the_policy_is_not_to_blame_for_counts_for_nothing():
    groups = [
        [trajectory(1.0), trajectory(0.0), trajectory(0.0, status="engine_error")],
        [trajectory(1.0), trajectory(0.0), trajectory(0.0, sampled=0, status="prompt_too_long")],
    ]
    batch, metrics, _ = make_batch(config(scale_by_std=False), groups)
    assert batch.loss_tokens == 8
    assert sorted(set(batch.advantages[batch.loss_mask])) == [-0.5, 0.5]
    np.testing.assert_allclose(metrics["rollout/untrainable_frac"], 2 / 6)


def test_a_reward_function_that_failed_is_not_taken_for_a_reward_of_0():
    unscored = trajectory(0.0, scored=False)
    batch, metrics, _ = make_batch(
        config(scale_by_std=False), [[trajectory(1.0), trajectory(0.0), unscored]]
    )
    assert sorted(set(batch.advantages[batch.loss_mask])) == [-0.5, 0.5]
    np.testing.assert_allclose(metrics["rollout/untrainable_frac"], 1 / 3)


@pytest.mark.parametrize("status", UNTRAINABLE)
def test_what_ended_by_a_fault_is_not_trained_on(status):
    groups = [[trajectory(1.0), trajectory(0.0), trajectory(1.0, status=status)]]
    batch, metrics, _ = make_batch(config(scale_by_std=False), groups)
    assert batch.loss_tokens == 4
    np.testing.assert_allclose(metrics["rollout/untrainable_frac"], 1 / 3)


def stream(tokens: list[int], sampled: int) -> TokenStream:
    """The last `sampled` tokens are the policy's."""
    given = len(tokens) - sampled
    return TokenStream(
        token_ids=tokens,
        prompt_tokens=given,
        loss_mask=[False] * given + [True] * sampled,
        rollout_log_probs=[0.0] * given + [-1.0] * sampled,
        version_spans=[],
    )


def test_a_trajectory_of_several_streams_counts_once_among_rewards_and_with_all_its_tokens():
    """Pain point 3: rewards 1 and 0 give advantages 0.5 and -0.5, however many streams the first one has."""
    forked = msgspec.structs.replace(trajectory(1.0), earlier_streams=[stream([5, 6, 9], 1)])
    batch, metrics, _ = make_batch(config(scale_by_std=False), [[forked, trajectory(0.0)]])
    assert len(batch.placements) == 3
    row, start, length = batch.placements[0]
    assert batch.tokens[row, start : start + length].tolist() == [5, 6, 9]
    assert sorted(batch.advantages[batch.loss_mask]) == [-0.5, -0.5, 0.5, 0.5, 0.5]
    assert metrics["perf/loss_tokens"] == 5
    assert metrics["rollout/untrainable_frac"] == 0


def test_what_was_sampled_before_a_fork_is_trained_on_though_nothing_came_after_it():
    silent = trajectory(1.0, sampled=0)
    forked = msgspec.structs.replace(silent, earlier_streams=[stream([5, 6, 9, 9], 2)])
    batch, _, _ = make_batch(config(scale_by_std=False), [[forked, trajectory(0.0)]])
    assert batch.loss_tokens == 4


def test_a_batch_with_nothing_to_learn_is_empty_not_an_error():
    batch, metrics, _ = make_batch(config(), [[trajectory(1.0), trajectory(1.0)]])
    assert batch.loss_tokens == 0
    assert metrics["perf/loss_tokens"] == 0


# --- estimators that need more than a reward a trajectory ---------------------------------------------------------

EXACT = Tolerance(rtol=1e-6, atol=1e-6)


def of_tokens(batch) -> list[list[float]]:
    """Advantages of the sampled tokens of each packed stream."""
    masks = unpack(batch.loss_mask, batch)
    return [a[m].tolist() for a, m in zip(unpack(batch.advantages, batch), masks, strict=True)]


def test_reinforce_plus_plus_puts_the_reward_on_the_last_trained_token():
    """Pain point 4: the trajectories end in an observation. Discounted 1/2 a token, rewards 1 and 3 over two and
    three tokens are returns (1/2, 1) and (3/4, 3/2, 3), which are whitened together."""
    groups = [[trajectory(1.0, sampled=2), trajectory(3.0, sampled=3)]]
    batch, _, credit = make_batch(config(adv_estimator="reinforce_plus_plus", gamma=0.5), groups)
    # Mean 1.35; squared deviations 0.7225, 0.1225, 0.36, 0.0225, 2.7225 sum to 3.95, over 4
    deviation = np.array([-0.85, -0.35, -0.6, 0.15, 1.65])
    expected = deviation / np.sqrt(3.95 / 4 + 1e-8)
    first, second = of_tokens(batch)
    np.testing.assert_allclose([*first, *second], expected, **EXACT)
    # What people are told of a trajectory is the mean over its tokens.
    np.testing.assert_allclose(
        credit.advantages, [[expected[:2].mean(), expected[2:].mean()]], **EXACT
    )


def test_reinforce_plus_plus_learns_from_groups_of_equal_rewards():
    groups = [[trajectory(1.0), trajectory(1.0)], [trajectory(0.0), trajectory(0.0)]]
    batch, metrics, _ = make_batch(config(adv_estimator="reinforce_plus_plus"), groups)
    # Eight tokens, four at 1 and four at 0: variance 8 x 1/4 / 7
    one = 0.5 / np.sqrt(2 / 7 + 1e-8)
    np.testing.assert_allclose(of_tokens(batch), [[one, one]] * 2 + [[-one, -one]] * 2, **EXACT)
    assert metrics["reward/zero_variance_group_frac"] == 1


def test_the_baseline_form_whitens_over_tokens():
    groups = [[trajectory(1.0, sampled=1), trajectory(0.0, sampled=3)]]
    batch, _, _ = make_batch(config(adv_estimator="reinforce_plus_plus_baseline"), groups)
    # 1/2 once and -1/2 three times: mean -1/4, variance (9/16 + 3/16) / 3 = 1/4
    first, second = of_tokens(batch)
    np.testing.assert_allclose([*first, *second], [1.5, -0.5, -0.5, -0.5], **EXACT)


def told(reward, *, accuracy: float, style: float | None, **options) -> Trajectory:
    terms = {} if style is None else {"style": style}
    return msgspec.structs.replace(
        trajectory(reward, **options), metrics={"acc": accuracy}, reward_terms=terms
    )


def test_gdpo_compares_each_reward_on_its_own():
    """acc 1 against 0, style 10 against 30 and 20; weights 1 and 1/2. Deviations only, so that it can be worked by
    hand: acc (2/3, -1/3, -1/3), style (-10, 10, 0) x 1/2."""
    group = [
        told(0.0, accuracy=1.0, style=10.0, sampled=1),
        told(0.0, accuracy=0.0, style=30.0, sampled=1),
        told(0.0, accuracy=0.0, style=20.0, sampled=1),
    ]
    gdpo = {"reward_keys": ("acc", "style"), "reward_weights": (1.0, 0.5), "scale_by_std": False}
    batch, metrics, _ = make_batch(config(adv_estimator="gdpo", **gdpo), [group])
    summed = np.array([2 / 3 - 5, -1 / 3 + 5, -1 / 3])
    np.testing.assert_allclose(np.concatenate(of_tokens(batch)), whitened(summed), **EXACT)
    # The reward itself is equal in all of them, and is not what counts.
    assert metrics["reward/zero_variance_group_frac"] == 0


def test_gdpo_takes_a_reward_that_a_trajectory_does_not_report_for_0():
    group = [
        told(0.0, accuracy=0.0, style=1.0, sampled=1),
        told(0.0, accuracy=0.0, style=None, sampled=1),
    ]
    batch, _, _ = make_batch(config(adv_estimator="gdpo", reward_keys=("style",)), [group])
    first, second = np.concatenate(of_tokens(batch))
    assert first == pytest.approx(-second)
    assert first > 0.5


def test_a_reward_that_nothing_reports_is_told_with_those_that_are():
    group = [told(1.0, accuracy=1.0, style=0.5), told(0.0, accuracy=0.0, style=0.5)]
    with pytest.raises(
        ValueError,
        match=r"grpo.reward_keys has 'format', which no trajectory of this step reports; they report "
        r"\['acc', 'style'\]",
    ):
        make_batch(config(adv_estimator="gdpo", reward_keys=("acc", "format")), [group])


def with_turns(reward, *earned: float, replied: float | None = None) -> Trajectory:
    """One sampled token a turn, each followed by an observation token; the tool of each turn gave what it `earned`."""
    tokens, mask, turns = [5, 6], [False, False], []
    for value in earned:
        start = len(tokens)
        call = ToolCallRecord(name="t", status="ok", result="", reward=value)
        turns.append(
            Turn(start=start, end=start + 1, policy_version=0, finish="stop", calls=[call])
        )
        tokens += [9, 8]
        mask += [True, False]
    if replied is not None:
        start = len(tokens)
        reply = InteractionReply(text="", score=replied)
        turns.append(Turn(start=start, end=start + 1, policy_version=0, finish="stop", reply=reply))
        tokens, mask = [*tokens, 9], [*mask, True]
    return msgspec.structs.replace(
        trajectory(reward),
        token_ids=tokens,
        loss_mask=mask,
        rollout_log_probs=[-1.0 if m else 0.0 for m in mask],
        turns=turns,
    )


def test_turn_credit_is_added_to_the_tokens_of_its_turn():
    group = [with_turns(1.0, 0.0, 2.0), with_turns(0.0, 1.0, replied=4.0), with_turns(0.0, 0.5)]
    made = config(scale_by_std=False, turn_coef=0.5)
    found = of_tokens(make_batch(made, [group])[0])
    # Trajectories: 2/3, -1/3, -1/3. First turns 0, 1, 1/2: mean 1/2. Second turns 2 and 4: mean 3; the third has none.
    expected = [
        [2 / 3 + 0.5 * -0.5, 2 / 3 + 0.5 * -1],
        [-1 / 3 + 0.5 * 0.5, -1 / 3 + 0.5 * 1],
        [-1 / 3],
    ]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **EXACT)


def filled(batch, groups, kl: list[list[float]]):
    """With a reference at -1 and old log-probs above it by `kl`, stream by stream."""
    old, ref = np.zeros(batch.tokens.shape, np.float32), np.zeros(batch.tokens.shape, np.float32)
    for values, (row, start, length), mask in zip(
        kl, batch.placements, unpack(batch.loss_mask, batch), strict=True
    ):
        old[row, start : start + length][mask] = np.array(values, np.float32) - 1
        ref[row, start : start + length][mask] = -1
    return batch.with_log_probs(old=old, ref=ref)


def test_a_kl_in_the_reward_comes_off_before_advantages_are_made():
    groups = [[trajectory(1.0, sampled=2), trajectory(0.0, sampled=1)]]
    made = config(scale_by_std=False, kl_in="reward", kl_loss_type="k1", kl_coef=9.0)
    batch = filled(make_batch(made, groups)[0], groups, [[0.1, 0.3], [0.2]])
    changed, kl = with_kl_in_reward(made, groups, batch, 0.5)
    # The coefficient is the one of the step, 1/2: 1 - 0.2 = 0.8 and -0.1, so +-0.45
    assert of_tokens(changed) == [pytest.approx([0.45, 0.45]), pytest.approx([-0.45])]
    # Mean over trajectories of 0.2 and 0.2, not over tokens
    assert kl == pytest.approx(0.2)
    (changed,) = changed.groups
    assert not changed.advantages[~changed.loss_mask].any()


def test_a_kl_in_the_reward_is_paid_by_each_token_under_reinforce_plus_plus():
    groups = [[trajectory(1.0, sampled=2), trajectory(0.0, sampled=1)]]
    made = config(adv_estimator="reinforce_plus_plus", gamma=0.5, kl_in="reward", kl_loss_type="k1")
    batch = filled(make_batch(made, groups)[0], groups, [[0.1, 0.3], [0.5]])
    changed, kl = with_kl_in_reward(made, groups, batch, 0.5)
    # Rewards (-0.05, 1 - 0.15) and -0.25; returns (-0.05 + 0.85 / 2, 0.85) and -0.25
    returns = np.array([0.375, 0.85, -0.25])
    first, second = of_tokens(changed)
    np.testing.assert_allclose([*first, *second], whitened(returns), **EXACT)
    assert kl == pytest.approx((0.2 + 0.5) / 2)


def test_a_kl_in_the_reward_spans_the_streams_of_a_trajectory():
    forked = msgspec.structs.replace(
        trajectory(1.0, sampled=1), earlier_streams=[stream([5, 6, 9], 1)]
    )
    groups = [[forked, trajectory(0.0, sampled=1)]]
    made = config(scale_by_std=False, kl_in="reward", kl_loss_type="k1")
    batch = filled(make_batch(made, groups)[0], groups, [[0.2], [0.4], [0.0]])
    changed, kl = with_kl_in_reward(made, groups, batch, 1.0)
    # 1 - 0.6 = 0.4 against 0
    assert of_tokens(changed) == [pytest.approx([0.2]), pytest.approx([0.2]), pytest.approx([-0.2])]
    assert kl == pytest.approx((0.3 + 0.0) / 2)


# --- remax --------------------------------------------------------------------------------------------------------


def test_remax_compares_with_the_greedy_trajectory_of_the_prompt():
    groups = [
        [trajectory(1.0), trajectory(0.0)],
        [trajectory(1.0, task=1), trajectory(1.0, task=1)],
    ]
    greedy = [[trajectory(0.25)], [trajectory(1.0, task=1)]]
    batch, metrics, credit = make_batch(config(adv_estimator="remax"), with_greedy(groups, greedy))
    assert of_tokens(batch) == [[0.75] * 2, [-0.25] * 2, [0.0] * 2, [0.0] * 2]
    assert credit.dropped == [["", "", BASELINE]] * 2
    assert credit.advantages.tolist() == [[0.75, -0.25, 0], [0, 0, 0]]
    assert metrics["rollout/untrainable_frac"] == 0


def test_remax_without_a_baseline_leaves_the_group_out():
    groups = [[trajectory(1.0), trajectory(0.0, scored=False)], [trajectory(1.0), trajectory(0.0)]]
    greedy = [[trajectory(9.0, status="engine_error")], [trajectory(1.0)]]
    batch, metrics, credit = make_batch(config(adv_estimator="remax"), with_greedy(groups, greedy))
    assert credit.dropped[0] == [NO_BASELINE, "it has no reward", BASELINE]
    assert of_tokens(batch) == [[0.0] * 2, [-1.0] * 2]
    assert metrics["rollout/untrainable_frac"] == 0.5


def test_remax_with_a_kl_in_the_reward_pays_for_what_comes_after_a_token():
    """verl: reversed sums of the tokens' rewards, less the baseline."""
    groups = with_greedy([[trajectory(1.0), trajectory(0.0, sampled=1)]], [[trajectory(0.5)]])
    made = config(adv_estimator="remax", kl_in="reward", kl_loss_type="k1")
    batch = filled(make_batch(made, groups)[0], groups, [[0.1, 0.3], [0.2]])
    changed, kl = with_kl_in_reward(made, groups, batch, 0.5)
    # Rewards (-0.05, 0.85) and -0.1; returns (0.8, 0.85) and -0.1; less 0.5
    assert of_tokens(changed) == [pytest.approx([0.3, 0.35]), pytest.approx([-0.6])]
    assert kl == pytest.approx(0.2)
