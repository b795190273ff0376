"""Writes data files that `tooljax.data.records` reads: `python -m tooljax.data.prepare gsm8k|arithmetic|guess_number`.

Each command is a module with `add_arguments(parser)` and `run(args)`.
"""
