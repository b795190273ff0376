"""Does GRPO teach halving a range? One of fifty numbers is guessed with a tool that says higher or lower, seven times.

    python benchmarks/guess_number.py                        # configs/guess_number.gin
    python benchmarks/guess_number.py --set run.seed=1 --set run.dir=runs/guess_number_1

The quickstart's job on other data (tooljax.data.prepare.guess_number), with a token for each number: a fresh decoder, a
cold start on games played badly, 20 steps of GRPO through a real sidecar. Held-out games are in ranges that neither the
cold start nor GRPO has seen. The goal is 80 % of them solved after 20 steps; the cold start, and the same policy with
the tool withheld, are what it is compared with. benchmarks/results.md has the figures.
"""

import sys
from collections.abc import Sequence

from tooljax.data.prepare import guess_number
from tooljax.quickstart import learn

CONFIG = ("--config", "configs/guess_number.gin")


def main(argv: Sequence[str]) -> int:
    """0 when the table was printed."""
    return learn(
        [*CONFIG, *argv],
        prog="benchmarks/guess_number.py",
        description=__doc__ or "",
        module=guess_number,
        whole_numbers=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
