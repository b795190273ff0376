"""Log-probabilities of given tokens from hidden states, without materialising the logits."""

from pallas_kernels.token_log_probs.api import TokenLogProbs as TokenLogProbs
from pallas_kernels.token_log_probs.api import token_log_probs as token_log_probs
from pallas_kernels.token_log_probs.api import token_loss as token_loss
from pallas_kernels.token_log_probs.problem import Shards as Shards
