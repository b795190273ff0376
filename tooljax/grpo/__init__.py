"""Group relative policy optimisation as pure functions, the paper's equation beside each."""

from tooljax.grpo.advantages import group_advantages as group_advantages
from tooljax.grpo.advantages import zero_variance as zero_variance
from tooljax.grpo.aggregation import token_mean as token_mean
from tooljax.grpo.kl import k1 as k1
from tooljax.grpo.kl import k2 as k2
from tooljax.grpo.kl import k3 as k3
from tooljax.grpo.policy_losses import clipped_ratio_loss as clipped_ratio_loss
from tooljax.grpo.policy_losses import importance_ratio as importance_ratio
