"""What must hold between settings of the algorithm."""

from collections.abc import Iterator

from tooljax.config.algorithm import GrpoConfig

Problem = tuple[tuple[str, ...], str]


def algorithm_problems(grpo: GrpoConfig) -> Iterator[Problem]:
    """The settings that contradict each other, and a sentence for each contradiction."""
    yield from _estimator(grpo)
    yield from _loss(grpo)
    yield from _kl(grpo)
    yield from _correction(grpo)


def _estimator(grpo: GrpoConfig) -> Iterator[Problem]:
    kind = grpo.adv_estimator
    if kind == "gdpo" and not grpo.reward_keys:
        yield _problem(
            "adv_estimator='gdpo' compares several rewards; name them in grpo.reward_keys, for example ('acc', 'tool')",
            "adv_estimator",
            "reward_keys",
        )
    if kind != "gdpo" and grpo.reward_keys:
        yield _problem(
            f"reward_keys={grpo.reward_keys} are of adv_estimator='gdpo', not of {kind!r}; leave them empty",
            "adv_estimator",
            "reward_keys",
        )
    if grpo.reward_weights and len(grpo.reward_weights) != len(grpo.reward_keys):
        yield _problem(
            f"reward_weights={grpo.reward_weights} must have one weight for each of reward_keys="
            f"{grpo.reward_keys}; leave it empty for equal weights",
            "reward_weights",
            "reward_keys",
        )
    if grpo.gamma != 1 and kind != "reinforce_plus_plus":
        yield _problem(
            f"gamma={grpo.gamma:g} is of adv_estimator='reinforce_plus_plus'; with {kind!r} the reward of a trajectory "
            "is one number; set grpo.gamma = 1",
            "gamma",
            "adv_estimator",
        )
    if kind in ("reinforce_plus_plus", "remax") and grpo.zero_variance == "refill":
        yield _problem(
            "zero_variance='refill' replaces groups whose rewards are equal, from which "
            f"adv_estimator={kind!r} learns too; set grpo.zero_variance = 'keep'",
            "zero_variance",
            "adv_estimator",
        )


def _loss(grpo: GrpoConfig) -> Iterator[Problem]:
    mode = grpo.loss_mode
    if mode in ("gspo", "geo_mean"):
        if grpo.loss_agg_mode != "seq-mean-token-mean":
            yield _problem(
                f"loss_mode={mode!r} has one ratio a trajectory, which loss_agg_mode={grpo.loss_agg_mode!r} would "
                "count once a token; set grpo.loss_agg_mode = 'seq-mean-token-mean'",
                "loss_mode",
                "loss_agg_mode",
            )
        if grpo.turn_coef or grpo.adv_estimator == "reinforce_plus_plus" and grpo.gamma != 1:
            yield _problem(
                f"loss_mode={mode!r} has one ratio a trajectory and takes one advantage for it; set "
                "grpo.turn_coef = 0 and grpo.gamma = 1, or another loss_mode",
                "loss_mode",
                "turn_coef",
            )
    if grpo.clip_dual and (grpo.clip_dual <= 1 or mode != "vanilla"):
        yield _problem(
            f"clip_dual={grpo.clip_dual:g} bounds loss_mode='vanilla' and must be above 1 (got loss_mode={mode!r}); "
            "set grpo.clip_dual = 3 or 0",
            "clip_dual",
            "loss_mode",
        )
    if grpo.loss_scale_factor and grpo.loss_agg_mode != "seq-mean-token-sum-norm":
        yield _problem(
            f"loss_scale_factor={grpo.loss_scale_factor} is of loss_agg_mode='seq-mean-token-sum-norm', not of "
            f"{grpo.loss_agg_mode!r}; set one or the other",
            "loss_scale_factor",
            "loss_agg_mode",
        )
    if grpo.clip_cov_low >= grpo.clip_cov_high:
        yield _problem(
            f"clip_cov_low={grpo.clip_cov_low:g} must be below clip_cov_high={grpo.clip_cov_high:g}: no token would "
            "be between them",
            "clip_cov_low",
            "clip_cov_high",
        )


def _kl(grpo: GrpoConfig) -> Iterator[Problem]:
    if grpo.kl_target and not grpo.kl_coef:
        yield _problem(
            f"kl_target={grpo.kl_target:g} steers kl_coef, which is 0 and stays so; set grpo.kl_coef above 0",
            "kl_target",
            "kl_coef",
        )
    if grpo.kl_in == "reward":
        if grpo.kl_loss_type.endswith("+"):
            yield _problem(
                f"kl_loss_type={grpo.kl_loss_type!r} is about a gradient, which a reward has not; write "
                f"grpo.kl_loss_type = {grpo.kl_loss_type[:-1]!r}",
                "kl_loss_type",
                "kl_in",
            )
        if grpo.adv_estimator == "gdpo":
            yield _problem(
                "kl_in='reward' changes the reward, which adv_estimator='gdpo' does not read; set grpo.kl_in = 'loss'",
                "kl_in",
                "adv_estimator",
            )


def _correction(grpo: GrpoConfig) -> Iterator[Problem]:
    if grpo.rollout_correction == "bypass" and grpo.rollout_is and grpo.loss_mode != "gpg":
        yield _problem(
            f"rollout_correction='bypass' has the engine in the ratio of loss_mode={grpo.loss_mode!r} already; "
            f"rollout_is={grpo.rollout_is!r} would count it twice. Leave it empty, or set grpo.loss_mode = 'gpg'",
            "rollout_correction",
            "rollout_is",
        )
    if grpo.rollout_is_low >= grpo.rollout_is_high:
        yield _problem(
            f"rollout_is_low={grpo.rollout_is_low:g} must be below rollout_is_high={grpo.rollout_is_high:g}",
            "rollout_is_low",
            "rollout_is_high",
        )
    if (grpo.rollout_is_low or grpo.rollout_is_normalize) and not grpo.rollout_is:
        yield _problem(
            "rollout_is_low and rollout_is_normalize are about importance weights, of which there are none; set "
            "grpo.rollout_is = 'token' or 'sequence'",
            "rollout_is",
            "rollout_is_low",
            "rollout_is_normalize",
        )
    kinds, low, high = grpo.rollout_rs, grpo.rollout_rs_low, grpo.rollout_rs_high
    if len(high) != len(kinds) or (low and len(low) != len(kinds)):
        yield _problem(
            f"rollout_rs={kinds} needs an upper bound for each in rollout_rs_high={high}, and as many or none in "
            f"rollout_rs_low={low}",
            "rollout_rs",
            "rollout_rs_high",
            "rollout_rs_low",
        )
        return
    for kind, least, most in zip(kinds, low or (0.0,) * len(kinds), high, strict=True):
        ratio = kind.endswith("k1")
        if most <= (1 if ratio and not least else 0) or least < 0 or (ratio and least >= most):
            yield _problem(
                f"rollout_rs={kind!r} cannot be from {least:g} to {most:g}; k1 takes bounds of a ratio, such as 0.5 "
                "and 2 (or 0 and 2, for 1/2), the others an upper bound above 0",
                "rollout_rs",
                "rollout_rs_low",
                "rollout_rs_high",
            )


def _problem(sentence: str, *fields: str) -> Problem:
    return tuple(f"grpo.{name}" for name in fields), f"grpo.{sentence}"
