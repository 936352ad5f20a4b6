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

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.leases.history import DONE, GIVEN, MS, LeaseVerdict, Place, Row, Rules, name_of
from chaos.leases.journal import Did, Outcome, Rows
from chaos.leases.positions import judge_floors, judge_stream

_OF_RECORDS = frozenset({Did.ACK, Did.NACK, Did.END, Did.EXTENDED, Did.REJECT, Did.REDRIVE})


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
            judge_stream(place, mine, known, found)
        judge_floors(place, mine, known, found)
        if place.left:
            found.says(f"{rules.what}s that nobody gets", f"{place.left} are left of {name_of(place)}")
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
            found.says(f"a {rules.what} that nobody put", f"{row.value:#x} in {name_of(place)}")
        elif numbers.setdefault(row.value, row.seq) != row.seq:
            seqs = sorted({numbers[row.value], row.seq})
            found.says(
                f"a {rules.what} is there twice", f"{row.value:#x} in {name_of(place)} has the numbers {seqs}"
            )


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
            name = f"{self.rules.what} {value:#x} of {name_of(self.place)}"
            claims = sorted((row for row in story if row.what in GIVEN), key=lambda row: row.deliveries)
            if value in put and not self.place.left and value not in self.letters:
                since = max((at for at, first in seeks.values() if first <= put[value]), default=0)
                self._judge_loss(name, story, since)
            self._judge_story(name, claims, story)

    def _judge_loss(self, name: str, story: Sequence[Row], since_ns: int) -> None:
        is_done = DONE if self.rules.is_logged else {Did.ACK}
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
    mine = [row for row in story if row.client == end.client and row.what in DONE]
    begun = [row for row in mine if row.at_ns <= end.at_ns]
    return bool(begun) and begun[-1].what == Did.ACK
