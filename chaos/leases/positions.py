"""Judge the positions of consumer groups: streams, and the floors of all groups. Pure functions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from chaos.leases.history import DONE, LeaseVerdict, Place, Row, name_of
from chaos.leases.journal import Did, Outcome

_FOR_EVER = 1 << 62


def judge_stream(place: Place, rows: Sequence[Row], known: Mapping[int, int], found: LeaseVerdict) -> None:
    """Judge a group in mode stream. `known`: value -> seq of the records whose put returned."""
    readings: dict[tuple[int, int], list[Row]] = defaultdict(list)
    given: set[int] = set()
    begun = _Highest()
    made = _Highest()
    for row in rows:
        if row.what == Did.READ:
            readings[row.client, row.begun_ns].append(row)
            given.add(row.value)
            found.read += 1
        elif row.what == Did.COMMIT:
            begun.add(row.at_ns, row.seq)
        elif row.what == Did.COMMIT_END and row.outcome == Outcome.OK:
            found.commits += 1
            made.add(row.at_ns, row.seq)
        elif row.what == Did.TAKEN:
            found.takeovers += 1
    numbers = sorted(known.values())
    found.done += bisect_right(numbers, made.by(_FOR_EVER))
    for reading in readings.values():
        _judge_reading(f"{name_of(place)}, client {reading[0].client}", reading, numbers, begun, made, found)
    _judge_fences(place, rows, found)
    if not place.left:
        for value in known.keys() - given:
            found.says(
                "a record is lost", f"{value:#x}, number {known[value]}, was never read in {name_of(place)}"
            )


def _judge_reading(
    name: str, reading: Sequence[Row], numbers: Sequence[int], begun: _Highest, made: _Highest,
    found: LeaseVerdict,
) -> None:  # fmt: skip
    first = reading[0]
    is_committed = made.by(first.begun_ns)
    if first.seq <= is_committed:
        found.says("a record came back", f"{name} is given {first.seq}, and {is_committed} was committed")
    before = numbers[bisect_left(numbers, first.seq) - 1] if numbers and numbers[0] < first.seq else 0
    if before > begun.by(first.at_ns):
        found.says(
            "a record is passed over", f"{name} begins with {first.seq}, and {before} is not committed"
        )
    for one, two in pairwise(reading):
        if two.seq <= one.seq:
            found.says("a reader goes back", f"{name}: {two.seq} behind {one.seq}")
        elif bisect_left(numbers, two.seq) - bisect_right(numbers, one.seq) > 0:
            found.says("a record is passed over", f"{name}: {two.seq} behind {one.seq}, and there are others")


def _judge_fences(place: Place, rows: Sequence[Row], found: LeaseVerdict) -> None:
    """Check that a reader cannot commit after another reader has taken over."""
    taken = {(row.client, row.begun_ns): row.at_ns for row in rows if row.what == Did.TAKEN}
    by_end = sorted((at_ns, begun_ns, client) for (client, begun_ns), at_ns in taken.items())
    # The latest begin among the takeovers that have returned by then.
    latest = _Highest()
    for at_ns, begun_ns, _ in by_end:
        latest.add(at_ns, begun_ns)
    asked: dict[tuple[int, int], int] = {}
    for row in rows:
        who = row.client, row.begun_ns
        if row.what == Did.COMMIT:
            asked[who] = row.at_ns
        elif row.what != Did.COMMIT_END or row.outcome != Outcome.OK:
            continue
        elif latest.by(asked[who]) > taken[who]:
            found.says("two read one group", f"client {row.client} committed {row.seq} in {name_of(place)}")


def judge_floors(place: Place, rows: Sequence[Row], known: Mapping[int, int], found: LeaseVerdict) -> None:
    """Check that floors never fall, and never exceed what was acked or committed."""
    looks = [row for row in rows if row.what == Did.FLOOR]
    found.looks += len(looks)
    ends = {row.begun_ns: row.at_ns for row in rows if row.what in {Did.SEEK_END, Did.REDRIVE_END}}
    seeks = {
        (row.at_ns, ends.get(row.begun_ns, _FOR_EVER)) for row in rows if row.what in {Did.SEEK, Did.REDRIVE}
    }
    for first, second in pairwise(looks):
        if second.seq >= first.seq:
            continue
        if not any(begun <= second.at_ns and end >= first.begun_ns for begun, end in seeks):
            found.says("a floor goes back", f"{name_of(place)}: from {first.seq} to {second.seq}")
    if not place.is_queue:
        begun = _Highest()
        for row in rows:
            if row.what == Did.COMMIT:
                begun.add(row.at_ns, row.seq)
        # The floor may exceed the committed seq if no written record lies in between.
        numbers = sorted(known.values())
        wrong = [look for look in looks if _last(numbers, look.seq) > begun.by(look.at_ns)]
    else:
        wrong = _ahead(looks, rows, known)
    for look in wrong:
        found.says("a floor is ahead", f"{name_of(place)}: {look.seq}, before everything up to it was done")


def _last(numbers: Sequence[int], up_to: int) -> int:
    """Return the last of these ascending numbers that is not above `up_to`; 0 if there is none."""
    at = bisect_right(numbers, up_to)
    return numbers[at - 1] if at else 0


def _ahead(looks: Sequence[Row], rows: Sequence[Row], known: Mapping[int, int]) -> list[Row]:
    """Return the looks whose floor is above a record for which no ack or reject had begun."""
    first_ack: dict[int, int] = {}
    for row in rows:
        if row.what in DONE:
            first_ack.setdefault(row.value, row.at_ns)
    ascending = sorted((seq, first_ack.get(value, _FOR_EVER)) for value, seq in known.items())
    numbers = [seq for seq, _ in ascending]
    all_done = list(accumulate((at for _, at in ascending), max))
    return [
        look for look in looks
        if (at := bisect_right(numbers, look.seq)) and all_done[at - 1] > look.at_ns
    ]  # fmt: skip


class _Highest:
    """The highest of a series of values that are added in order of time."""

    def __init__(self) -> None:
        self._instants: list[int] = []
        self._values: list[int] = []

    def add(self, at_ns: int, value: int) -> None:
        """Add a value."""
        self._instants.append(at_ns)
        self._values.append(max(value, self._values[-1] if self._values else 0))

    def by(self, at_ns: int) -> int:
        """Return the highest value added before this instant; 0 if there is none."""
        at = bisect_left(self._instants, at_ns)
        return self._values[at - 1] if at else 0
