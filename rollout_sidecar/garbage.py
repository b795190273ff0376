"""Python's cycle collector in a process that serves.

SGLang or JAX leave about a million objects in it. A full collection looks at each of them, which takes a second or two
in which nothing is answered and the engine stands idle; what rollouts leave behind is enough to cause one every few
thousand turns.
"""

import gc

THRESHOLDS = (20_000, 10, 10)
"""New objects between two collections of the youngest generation, where Python's default is 700 to 2,000: a turn of a
thousand tokens makes as many."""


def set_aside_what_is_there() -> None:
    """Call it once everything is loaded: collections look only at what comes later. Takes a full collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
