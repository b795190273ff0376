"""Log-probabilities of given tokens from hidden states, without materialising the logits."""

from pallas_kernels.token_log_probs.api import token_log_probs as token_log_probs
