"""Judge a history of leases after all work was done. Pure functions.

For every queue and group:

- No record is lost: each was done, or is in the dead-letter topic once. A stream's reader received it.
- No record comes back: a claim that began after the record was known to be done did not return it.
- A leased record is not delivered to another client. Between two deliveries the lease ended, its holder
  nacked it or died, or another member stole it legitimately. Leases in memory end with their shard. Leases in
  the log survive every process, so only the death of the holder excuses a repeat. Each further delivery is
  counted under its reason.
- No delivery count occurs twice, and no ack succeeds for a record that another client has finished.
- The floor of a group never falls, and never exceeds what a client has acked or committed.

For a stream: each reader starts after a commit, skips no record, and cannot commit after another reader has
taken over.

A group that a seek moved back is judged only by records lost since then and by its floor. A redriven record
may be delivered once more for each of its redriven dead letters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from chaos.leases.journal import Did, Outcome, Rows

STORIES_MAX = 5
"""Number of stories kept for each kind of fault."""
MS = 1_000_000
GIVEN = frozenset({Did.CLAIMED, Did.TAKEN_OVER, Did.STOLEN})
_DONE = frozenset({Did.ACK, Did.REJECT})
_OF_RECORDS = frozenset({Did.ACK, Did.NACK, Did.END, Did.EXTENDED, Did.REJECT, Did.REDRIVE})
_FOR_EVER = 1 << 62


class Row(NamedTuple):
    """One row of a journal; see journal.py for the fields."""

    at_ns: int
    begun_ns: int
    client: int
    queue: int
    what: int
    outcome: int
    group: int
    value: int
    seq: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class Place:
    """A queue or a group to judge."""

    topic: int
    group: int = 0
    is_queue: bool = True
    is_sought: bool = False
    left: int = 0
    """Records that were never delivered, or delivered and not done."""


@dataclass(frozen=True, slots=True)
class Death:
    """A kill between two instants."""

    role: str
    from_ns: int
    to_ns: int
    client: int = 0
    """Number of the killed client; 0 for a process of the engine."""

    @property
    def is_of_shard(self) -> bool:
        """Whether this death loses the memory of a shard."""
        return self.role in {"wal_shard", "all", "supervisor"}

    def is_within(self, from_ns: int, to_ns: int) -> bool:
        """Whether the death may have happened between these instants."""
        return self.to_ns >= from_ns and self.from_ns <= to_ns


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a lease lasts, and what ends it."""

    lease_ms: int
    idle_ms: int = 1 << 40
    """Idle time (ms) after which another member may take a lease."""
    is_logged: bool = True
    """Whether leases and rejections are in the log. Otherwise they are in the memory of a shard."""
    deaths: Sequence[Death] = ()
    what: str = "record"
    """Words for a leased item and, in `who`, for its holder."""
    who: str = "member"

    def shard_died(self, from_ns: int, to_ns: int) -> bool:
        """Whether leases may have ended with a shard between these instants."""
        return not self.is_logged and any(
            death.is_of_shard and death.is_within(from_ns, to_ns) for death in self.deaths
        )


@dataclass(slots=True)
class LeaseVerdict:
    """Counts and faults of a run."""

    records: int = 0
    """Records whose put returned."""
    done: int = 0
    """Records with a successful ack or commit, summed over all groups."""
    dead: int = 0
    doubles: int = 0
    """Deliveries after the first, of queues and of groups in queue mode."""
    read: int = 0
    commits: int = 0
    takeovers: int = 0
    """Takeovers of streams."""
    looks: int = 0
    seeks: int = 0
    redriven: int = 0
    """Dead letters whose redrive returned."""
    explained: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def says(self, fault: str, story: str) -> None:
        """Count a fault, with a story."""
        self.wrong[fault] += 1
        if self.wrong[fault] <= STORIES_MAX:
            self.stories.append(f"{fault}: {story}")


def judge(
    rows: Rows, places: Sequence[Place], rules: Rules, letters: Mapping[int, int] | None = None
) -> LeaseVerdict:
    """Judge the journals of these queues and groups.

    Args:
        rows: rows of all journals, sorted by time.
        letters: how often each value is in the dead-letter topic.
    """
    letters = letters or {}
    found = LeaseVerdict(dead=len(letters))
    history = [Row(*row) for row in rows.tolist()]
    answered: dict[int, dict[int, int]] = defaultdict(dict)
    """By topic: value -> seq, 0 if unknown."""
    said: dict[tuple[int, int], list[Row]] = defaultdict(list)
    begun: set[int] = set()
    for row in history:
        if row.what == Did.PUT:
            begun.add(row.value)
        elif row.what == Did.PUT_END:
            if row.outcome == Outcome.OK:
                answered[row.queue][row.value] = row.seq
        else:
            said[row.queue, row.group].append(row)
    found.records = sum(map(len, answered.values()))
    _judge_letters(history, letters, any(place.left for place in places), begun, rules, found)
    for place in places:
        mine, put = said[place.topic, place.group], answered[place.topic]
        known = {value: seq for value, seq in put.items() if seq}
        _judge_numbers(place, mine, known, begun, rules, found)
        if place.is_queue:
            _Leased(place, rules, letters, found).judge(mine, put)
        else:
            _judge_stream(place, mine, known, found)
        _judge_floors(place, mine, known, found)
        if place.left:
            found.says(f"{rules.what}s that nobody gets", f"{place.left} are left of {_name(place)}")
    return found


def _judge_letters(
    history: Sequence[Row], letters: Mapping[int, int], is_left: bool, put: set[int], rules: Rules,
    found: LeaseVerdict,
) -> None:  # fmt: skip
    """Check that each rejected record is in the dead-letter topic once, and no other record is there."""
    begun: set[int] = set()
    ended: set[int] = set()
    at: dict[int, int] = {}
    back = {row.begun_ns for row in history if row.what == Did.REDRIVE_END}
    found.redriven = sum(row.what == Did.REDRIVE_END for row in history)
    # If a redrive did not return, its record may be rejected again before its first dead letter is deleted.
    unsure = Counter(row.value for row in history if row.what == Did.REDRIVE and row.begun_ns not in back)
    for row in history:
        if row.what == Did.REJECT:
            begun.add(row.value)
            at[row.client] = row.value
        elif row.what == Did.END and row.outcome == Outcome.OK and at.pop(row.client, None) == row.value:
            ended.add(row.value)
        elif row.what == Did.ACK:
            at.pop(row.client, None)
    for value, times in letters.items():
        if value not in put:
            found.says(f"a {rules.what} that nobody put", f"dead letter {value:#x}")
        elif rules.is_logged and value not in begun:
            found.says("a letter that nobody rejected", f"{value:#x}")
        if times > 1 + unsure[value]:
            found.says("a dead letter is there twice", f"{value:#x}: {times} times")
    # A rejection in memory is lost with its shard. The next holder may ack the record instead.
    for value in ended - letters.keys() if rules.is_logged and not is_left else ():
        found.says(f"a {rules.what} is lost", f"{value:#x} was rejected, and is not among the dead letters")


def _name(place: Place) -> str:
    return f"group {place.group} of topic {place.topic}"


def _judge_numbers(
    place: Place, rows: Iterable[Row], known: Mapping[int, int], begun: set[int], rules: Rules,
    found: LeaseVerdict,
) -> None:  # fmt: skip
    """Check that each delivered record has one seq and was put by a client."""
    numbers = dict(known)
    for row in rows:
        if row.what not in GIVEN and row.what != Did.READ:
            continue
        if row.value not in begun:
            found.says(f"a {rules.what} that nobody put", f"{row.value:#x} in {_name(place)}")
        elif numbers.setdefault(row.value, row.seq) != row.seq:
            seqs = sorted({numbers[row.value], row.seq})
            found.says(
                f"a {rules.what} is there twice", f"{row.value:#x} in {_name(place)} has the numbers {seqs}"
            )


# -- queues, and groups in mode queue -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leased:
    """Judges the deliveries of each record of one queue or group."""

    place: Place
    rules: Rules
    letters: Mapping[int, int]
    found: LeaseVerdict

    def judge(self, rows: Sequence[Row], put: Mapping[int, int]) -> None:
        """Judge the history of each record, and that none is lost."""
        stories: dict[int, list[Row]] = {value: [] for value in put}
        seeks: dict[int, tuple[int, int]] = {}
        for row in rows:
            if row.what in GIVEN or row.what in _OF_RECORDS:
                stories.setdefault(row.value, []).append(row)
            elif row.what == Did.SEEK_END:
                self.found.seeks += 1
                seeks[row.begun_ns] = (row.begun_ns, row.seq)
        for value, story in stories.items():
            name = f"{self.rules.what} {value:#x} of {_name(self.place)}"
            claims = sorted((row for row in story if row.what in GIVEN), key=lambda row: row.deliveries)
            if value in put and not self.place.left and value not in self.letters:
                since = max((at for at, first in seeks.values() if first <= put[value]), default=0)
                self._judge_loss(name, story, since)
            self._judge_story(name, claims, story)

    def _judge_loss(self, name: str, story: Sequence[Row], since_ns: int) -> None:
        is_done = _DONE if self.rules.is_logged else {Did.ACK}
        if not any(row.what in is_done and row.at_ns >= since_ns for row in story):
            given = sum(row.what in GIVEN for row in story)
            self.found.says(
                f"a {self.rules.what} is lost", f"{name} was given out {given} times, and never acked"
            )

    def _judge_story(self, name: str, claims: Sequence[Row], story: Sequence[Row]) -> None:
        """Count and explain each delivery after the first.

        A row may be written late. Without delivery counts, the claim recorded first need not be the first
        one.
        """
        found = self.found
        found.doubles += max(len(claims) - 1, 0)
        finished = [row for row in story if row.what == Did.END and row.outcome == Outcome.OK]
        found.done += bool(finished)
        if self.place.is_sought:
            found.explained["told to go back"] += max(len(claims) - 1, 0)
            return
        letters = [row for row in story if row.what == Did.REDRIVE]
        self._judge_ends(name, claims, story, finished, letters)
        if letters:
            found.explained["came back from the dead"] += max(len(claims) - 1, 0)
            return
        for first, second in pairwise(claims):
            why = self._why(first, second, story)
            if not why and not first.deliveries and second.begun_ns <= first.at_ns:
                why = self._why(second, first, story)
            found.explained[why or "nothing"] += 1
            if not why:
                after_ms = (second.at_ns - first.begun_ns) / MS
                found.says(
                    f"two {self.rules.who}s have one {self.rules.what}",
                    f"{name}: client {first.client}, then client {second.client} {after_ms:.0f} ms later,"
                    f" deliveries {first.deliveries} and {second.deliveries};"
                    f" {self._told(story, first.begun_ns)}",
                )

    def _judge_ends(
        self, name: str, claims: Sequence[Row], story: Sequence[Row], finished: Sequence[Row],
        letters: Sequence[Row],
    ) -> None:  # fmt: skip
        """Check that a record is done once, and once more for each of its redriven dead letters."""
        rules, found = self.rules, self.found
        certain_ends = [row for row in finished if rules.is_logged or _is_ack(row, story)]
        for claim in claims:
            back = len({letter.seq for letter in letters if letter.at_ns <= claim.at_ns})
            if len(certain_ends) > back and certain_ends[back].at_ns < claim.begun_ns:
                later_ms = (claim.begun_ns - certain_ends[back].at_ns) / MS
                found.says(
                    f"a {rules.what} came back",
                    f"{name}: by a claim that began {later_ms:.0f} ms after its ack",
                )
        if claims and len(finished) > 1 + len({letter.seq for letter in letters}):
            from_ns = min(row.begun_ns for row in claims)
            if not rules.shard_died(from_ns, finished[-1].at_ns):
                clients = [row.client for row in finished]
                found.says(
                    f"a {rules.what} is finished twice",
                    f"{name} by clients {clients}; {self._told(story, from_ns)}",
                )

    def _why(self, first: Row, second: Row, story: Sequence[Row]) -> str:
        """Return why a record was delivered again; empty if nothing explains it."""
        rules = self.rules
        if first.deliveries and first.deliveries == second.deliveries:
            return ""
        of_first = [row for row in story if row.client == first.client and row.at_ns <= second.at_ns]
        of_first = [row for row in of_first if row.at_ns >= first.at_ns]
        gives_back = {Did.NACK} if rules.is_logged else {Did.NACK, Did.REJECT}
        if any(row.what in gives_back for row in of_first):
            return "given back"
        held_ns = max([first.begun_ns, *(row.begun_ns for row in of_first if row.what == Did.EXTENDED)])
        after_ms = (second.at_ns - held_ns) / MS
        if after_ms >= rules.lease_ms:
            return "lease ended"
        if rules.shard_died(first.begun_ns, second.at_ns):
            return "shard died"
        died = [death for death in rules.deaths if death.client and death.client == first.client]
        if any(death.is_within(first.begun_ns, second.at_ns) for death in died):
            return f"{rules.who} died"
        if after_ms >= rules.idle_ms:
            if second.what != Did.CLAIMED:
                return "stolen" if second.what == Did.STOLEN else "taken over"
            if second.deliveries > first.deliveries + 1:
                return "somebody between them who died"
        return ""

    def _told(self, story: Sequence[Row], from_ns: int) -> str:
        """Return the rows of a record and the deaths of that time as text, in ms from an instant."""
        told = [
            (row.at_ns, f"client {row.client} {Did(row.what).name.lower()}"
             + (f" begun {(row.begun_ns - from_ns) / MS:.0f}" if row.begun_ns else "")
             + (f" {Outcome(row.outcome).name.lower()}" if row.what == Did.END else ""))
            for row in story
        ]  # fmt: skip
        first, last = min(told)[0], max(told)[0]
        told += [
            (death.to_ns, f"{death.role} {death.client or ''} died")
            for death in self.rules.deaths if death.is_within(first, last)
        ]  # fmt: skip
        return "; ".join(f"{(at_ns - from_ns) / MS:.0f} {what}" for at_ns, what in sorted(told))


def _is_ack(end: Row, story: Sequence[Row]) -> bool:
    """Whether this row ends an ack and not a reject."""
    mine = [row for row in story if row.client == end.client and row.what in _DONE]
    begun = [row for row in mine if row.at_ns <= end.at_ns]
    return bool(begun) and begun[-1].what == Did.ACK


# -- mode stream ------------------------------------------------------------------------------------------


def _judge_stream(place: Place, rows: Sequence[Row], known: Mapping[int, int], found: LeaseVerdict) -> None:
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
        _judge_reading(f"{_name(place)}, client {reading[0].client}", reading, numbers, begun, made, found)
    _judge_fences(place, rows, found)
    if not place.left:
        for value in known.keys() - given:
            found.says(
                "a record is lost", f"{value:#x}, number {known[value]}, was never read in {_name(place)}"
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
            found.says("two read one group", f"client {row.client} committed {row.seq} in {_name(place)}")


# -- floors -----------------------------------------------------------------------------------------------


def _judge_floors(place: Place, rows: Sequence[Row], known: Mapping[int, int], found: LeaseVerdict) -> None:
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
            found.says("a floor goes back", f"{_name(place)}: from {first.seq} to {second.seq}")
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
        found.says("a floor is ahead", f"{_name(place)}: {look.seq}, before everything up to it was done")


def _last(numbers: Sequence[int], up_to: int) -> int:
    """Return the last of these ascending numbers that is not above `up_to`; 0 if there is none."""
    at = bisect_right(numbers, up_to)
    return numbers[at - 1] if at else 0


def _ahead(looks: Sequence[Row], rows: Sequence[Row], known: Mapping[int, int]) -> list[Row]:
    """Return the looks whose floor is above a record for which no ack or reject had begun."""
    first_ack: dict[int, int] = {}
    for row in rows:
        if row.what in _DONE:
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
