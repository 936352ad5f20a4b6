"""Make a failing case smaller: leave out operations and faults as long as it fails in the same way.

Steps are left out in ever smaller pieces (Zeller's ddmin). What is left out changes the order in which tasks
run, so a smaller case may fail no more although its steps would be enough: the answer is small, not smallest.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chaos.world.cases import Case

RUNS_MAX = 400
"""Cases tried before the smallest so far is good enough."""
KIND_WORDS = 6


def kind_of(what: str) -> str:
    """How it failed, without numbers and names that differ from run to run."""
    words = re.sub(r"[^a-zA-Z ]", " ", what).split()
    return " ".join(word for word in words if len(word) > 2 or word == "is")[: 12 * KIND_WORDS]


def shrink(case: Case, fails: Callable[[Case], str], runs_max: int = RUNS_MAX) -> Case:
    """The smallest case found that fails as `case` does; `fails` says how, or "". Raises ValueError when
    the case does not fail at all."""
    wanted = kind_of(fails(case))
    if not wanted:
        raise ValueError(f"{case} does not fail")
    kept, pieces, runs = case.kept, 2, 1
    while len(kept) > 1 and runs < runs_max:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if kind_of(fails(Case.of(case.seed, fewer))) == wanted:
                kept, pieces = fewer, max(pieces - 1, 2)
                break
            if runs >= runs_max:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(kept))
    return Case.of(case.seed, kept)
