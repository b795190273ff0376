import gc

from rollout_sidecar import garbage


class Node:
    """In a cycle with itself."""

    def __init__(self):
        self.itself = self


def is_seen(node: Node) -> bool:
    """By the collector, which does not list what was set aside."""
    return any(each is node for each in gc.get_objects())


def test_collections_pass_over_what_was_there_and_still_find_later_cycles():
    thresholds = gc.get_threshold()
    before = Node()
    try:
        garbage.set_aside_what_is_there()
        assert not is_seen(before)
        assert gc.get_threshold() == garbage.THRESHOLDS
        later = Node()
        assert is_seen(later)
        del later
        assert gc.collect() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert is_seen(before)
