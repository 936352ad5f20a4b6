"""`python -m chaos.states [longest]`: every history of up to that many steps (2 unless told)."""

from __future__ import annotations

import sys

from chaos.states.explore import Tally, explore, histories


def main() -> int:
    """Explore everything and say how much that was."""
    longest = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    tally = Tally()
    for steps in histories(longest):
        explore([steps], tally)
        print(
            f"{tally.seconds:7.1f} s  {tally.judged:7d} judged of {tally.images:8d} images  {'+'.join(steps)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
