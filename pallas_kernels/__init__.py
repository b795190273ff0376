"""Kernels, each beside its plain reference, its test shapes and its chooser. Imports jax and numpy only."""
