"""The search for a linearization, on histories with a known answer."""

from __future__ import annotations

import itertools
import random

import pytest

from chaos.check import lin
from chaos.check.lin import FOREVER, Op, find_order, keyed_append, log


def append(invoked, returned, result=None, value="k"):
    return Op(invoked, returned, "append", value, result)


def look(invoked, returned, result):
    return Op(invoked, returned, "look", "k", result)


@pytest.mark.parametrize(
    "history",
    [
        [append(0, 1, 7), append(2, 3, 7)],
        [append(0, 9, 7), append(1, 2, 7), look(3, 4, 7)],
        [append(0, FOREVER), append(1, 2, 7), look(3, 4, 7)],
        [append(0, FOREVER), look(1, 2, 0), look(3, 4, 7), append(5, 6, 7)],
        [append(0, FOREVER), look(1, 2, 0)],
        [],
    ],
)
def test_find_order_accepts_linearizable_histories(history):
    assert find_order(history, 0, keyed_append) is not None


@pytest.mark.parametrize(
    "history",
    [
        [append(0, 1, 7), append(2, 3, 8)],  # applied twice
        [append(0, 9, 7), append(1, 9, 8)],
        [append(0, 1, 7), look(2, 3, 0)],  # lost
        [look(0, 1, 7), append(2, 3, 7)],  # seen before it was sent
        [append(0, FOREVER), look(1, 2, 7), look(3, 4, 8)],
        # A read saw the append of unknown outcome, and the next read does not. Only a checker that keeps
        # unknown outcomes finds this.
        [append(0, FOREVER), look(1, 2, 7), look(3, 4, 0)],
    ],
)
def test_find_order_rejects_histories_that_are_not_linearizable(history):
    assert find_order(history, 0, keyed_append) is None


def test_a_read_can_be_explained_only_with_the_unknown_append():
    """Without the append of unknown outcome the read has no explanation (mutant 48)."""
    unknown = append(0, FOREVER, value="a")
    history = [append(1, 2, 2, value="b"), Op(3, 4, "read", None, ("a", "b"))]
    assert find_order(history, (), log) is None
    assert find_order([unknown, *history], (), log) is not None


def test_find_order_agrees_with_all_permutations():
    """On small random histories the verdict is the same as from all permutations."""
    random_ = random.Random(5)
    verdicts = []
    for _ in range(400):
        ops = []
        for n in range(random_.randint(1, 5)):
            begin = random_.randint(0, 6)
            end = FOREVER if random_.random() < 0.2 else begin + random_.randint(1, 4)
            if random_.random() < 0.6:
                ops.append(append(begin, end, random_.randint(1, 4), value=n))
            else:
                seen = tuple(random_.sample(range(5), random_.randint(0, 3)))
                ops.append(Op(begin, end, "read", None, seen))
        slow = explained_by_trying(ops)
        assert (find_order(ops, (), log) is not None) == slow
        verdicts.append(slow)
    assert 20 < sum(verdicts) < 380


def explained_by_trying(ops):
    must = [op for op in ops if op.returned < FOREVER]
    may = [op for op in ops if op.returned == FOREVER]
    for count in range(len(may) + 1):
        for some in itertools.combinations(may, count):
            for order in itertools.permutations([*must, *some]):
                if explains(order):
                    return True
    return False


def explains(order):
    if any(later.returned < op.invoked for n, op in enumerate(order) for later in order[n + 1 :]):
        return False
    state = ()
    for op in order:
        states = list(log(state, op))
        if not states:
            return False
        (state,) = states
    return True


def test_a_search_beyond_the_limit_raises_search_too_long(monkeypatch):
    monkeypatch.setattr(lin, "STEPS_MAX", 50)
    ops = [append(0, 100, 1 if n else 99, value=n) for n in range(8)]
    with pytest.raises(lin.SearchTooLong):
        find_order([*ops, *(append(0, FOREVER, value=f"u{n}") for n in range(9))], (), log)
