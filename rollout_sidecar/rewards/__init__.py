"""Rewards: verl's compute_score signature, the built-in functions, and custom ones by path."""
