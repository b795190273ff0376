"""Does GRPO teach halving a range? A number is guessed with a tool that says higher or lower, in at most six guesses.

    python benchmarks/guess_number.py                        # configs/guess_number.gin
    python benchmarks/guess_number.py --set run.seed=1 --set run.dir=runs/guess_number_1

The quickstart's job on other data (tooljax.data.prepare.guess_number): a fresh decoder, a cold start on games played
badly, 20 steps of GRPO through a real sidecar. Held-out games are in ranges that neither the cold start nor GRPO has
seen. The goal is 80 % of them solved after 20 steps; the same policy with the tool withheld is the baseline.

The goal is not reached (configs/guess_number.gin has the figures). GRPO unlearns answers that come too early, and no
more: a fifth of the cold start's guesses are numbers that it was told cannot be, and after 20 steps it is a quarter.
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
