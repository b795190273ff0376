"""A tiny decoder, a sampler of it, and what the trainer makes of the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from random_decoder import random_decoder

from tooljax.model.decoder import DecoderConfig
from tooljax.model.sampler import Generation, Sampler, unstack

# Odd sizes, so that no row or column lies where vectors of 8 or 16 begin.
CFG = DecoderConfig(
    family="qwen3",
    vocab=101,
    embed=36,
    layers=2,
    q_heads=6,
    kv_heads=2,
    head_dim=6,
    ffw=52,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tied_head=False,
    max_positions=512,
    qk_norm=True,
    dtype="float32",
)
SLOTS, LIMIT = 5, 300


def make_sampler(seed: int = 0, **options) -> Sampler:
    sampler = Sampler(
        CFG,
        unstack(random_decoder(CFG, seed)),
        **{"slots": SLOTS, "max_model_tokens": LIMIT, **options},
    )
    sampler.warm_up()
    return sampler


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, CFG.vocab, length).tolist()


def turn(name: str, tokens: list[int], **options) -> Generation:
    return Generation(
        trajectory_id=name, token_ids=tokens, **{"max_tokens": 12, "seed": 7, **options}
    )


def finish(sampler: Sampler, *turns: Generation) -> dict:
    """Submits the turns and steps until all that runs has ended."""
    for each in turns:
        sampler.submit(each)
    ended = {}
    while sampler.busy:
        ended |= {generated.trajectory_id: generated for generated in sampler.step()}
    return ended


def trainer_logits(decoder, tokens):
    """The trainer's forward pass over the whole sequence, padded to one length so that it is compiled once."""
    padded = jnp.array([tokens + [0] * (320 - len(tokens))], jnp.int32)
    positions = jnp.arange(320, dtype=jnp.int32)[None]
    segment_ids = (positions < len(tokens)).astype(jnp.int32)
    return decoder.logits(padded, positions, segment_ids)[0, : len(tokens)]


def trainer_log_probs(decoder, context, sampled, temperature=1.0):
    """Log-probs of the sampled tokens from the trainer's forward pass."""
    logits = trainer_logits(decoder, [*context, *sampled])
    log_probs = np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))
    places = np.arange(len(context) - 1, len(context) - 1 + len(sampled))
    return log_probs[places, sampled]


# --- right numbers ----------------------------------------------------------------------------------------------------
