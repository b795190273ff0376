"""Shapes of real models, by name, for tests and benchmarks."""

from typing import Literal, NamedTuple


class Shape(NamedTuple):
    """One call of token_log_probs."""

    tokens: int
    embed: int
    vocab: int
    dtype: Literal["float32", "bfloat16"]


SHAPES = {
    # The vocabularies of Qwen are 128 x 1187 (a prime) and 128 x 1188: tiles of the first do not divide it.
    "smollm2_135m": Shape(4096, 576, 49152, "bfloat16"),
    "qwen2_5_0_5b": Shape(4096, 896, 151936, "bfloat16"),
    "qwen3_1_7b": Shape(4096, 2048, 151936, "bfloat16"),
    "qwen2_5_7b": Shape(4096, 3584, 152064, "bfloat16"),
    "llama3_8b": Shape(4096, 4096, 128256, "bfloat16"),
}
"""A microbatch of 4096 tokens of each."""

SMALL_SHAPES = {
    "one_chunk": Shape(64, 32, 128, "float32"),
    "ragged": Shape(301, 48, 1187, "float32"),
    "one_token": Shape(1, 8, 5, "float32"),
    "ragged_bfloat16": Shape(203, 64, 1187, "bfloat16"),
}
"""What a CPU can check: ragged in every axis, and with one token."""

HOPPER_SHAPES = {
    "aligned": Shape(1024, 256, 4096, "bfloat16"),
    "rest_of_64_columns": Shape(1023, 128, 1216, "bfloat16"),
    "rest_of_8_columns": Shape(511, 192, 5000, "bfloat16"),
    "odd_vocab": Shape(203, 64, 1187, "bfloat16"),
    "one_token": Shape(1, 64, 131, "bfloat16"),
}
"""What the kernel for Hopper takes different paths for."""
