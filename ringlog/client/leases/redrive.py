"""Redrive of dead letters: selection of the letters of a queue or group. Shared by both clients.

The engine moves the letters (actors/scheduler/forwarding/redrive.py), since a client cannot delete single
records by seq.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ringlog.client.connection.session import Session
from ringlog.client.leases.dead_letters import split_for_move
from ringlog.client.leases.lease_operations import LeaseOperations
from ringlog.client.read.pages import Record
from ringlog.client.requests.validation import check_int_range, check_seq, check_sequence
from ringlog.envelope.messages import DeadLettersRedriven, RedriveDeadLetters, TopicState
from ringlog.errors import TopicNotFound, UsageError
from ringlog.limits import DEAD_LETTERS_PER_MOVE
from ringlog.link.futures import Steps

RedriveFilter = Callable[[Record], bool] | Collection[int] | None
"""Selects letters: by a function of the record, by seqs in the dead-letter topic, or all (None)."""


@dataclass(frozen=True, slots=True)
class RedriveReport:
    """Result of a redrive: `moved` letters returned to their queue, or their group delivers the records
    again.

    `repeated` of these had returned by an earlier redrive that did not delete the letters.
    """

    topic: str
    dead_letter: str
    moved: int
    repeated: int
    gone: int = 0
    """Letters of a group that stay, because their records are no longer in the topic."""


class Redrive:
    """State of one redrive call: filter, limit, rate and counts."""

    def __init__(
        self, operations: LeaseOperations, where: RedriveFilter, limit: int | None, rate: float | None
    ) -> None:
        if limit is not None:
            limit = check_int_range(limit, "limit")
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < inf
        ):
            raise UsageError(f"rate must be a number above 0, got {repr(rate)[:80]}")
        self._operations = operations
        self._where = (
            where
            if where is None or callable(where)
            else frozenset(check_seq(seq, "where") for seq in check_sequence(where, "where"))
        )
        self._left = limit
        self._rate = rate
        self._dead = ""
        self._head = self._moved = self._repeated = self._gone = 0

    @property
    def is_done(self) -> bool:
        """True if the limit is reached."""
        return self._left == 0

    def begin(self, session: Session) -> Steps[str | None]:
        """Resolve both topics. Returns the name of the dead-letter topic, None if it does not exist."""
        session.topics.forget(self._operations.topic)
        self._dead = name = yield from self._operations.dead_letter(session)
        session.topics.forget(name)
        try:
            reply = yield from session.topics.ask_resolved_topic(name, lambda _: TopicState(name, False))
        except TopicNotFound:
            return None
        # Letters that arrive after this point are not moved; otherwise the redrive might never end.
        self._head = reply.head_seq
        return name

    def select_parts(self, items: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """Return the selected letters among these records, in parts of the size that `move` accepts."""
        selected = [
            item for item in items if item.seq <= self._head and self._operations.is_own_dead_letter(item)
        ]
        if callable(self._where):
            selected = list(filter(self._where, selected))
        elif self._where is not None:
            selected = [item for item in selected if item.seq in self._where]
        selected = selected if self._left is None else selected[: self._left]
        most = (
            DEAD_LETTERS_PER_MOVE if self._rate is None else min(int(self._rate) + 1, DEAD_LETTERS_PER_MOVE)
        )
        for part in split_for_move(selected, most):
            if self._left is not None:
                self._left -= len(part)
            yield part

    def move(self, session: Session, letters: Sequence[Record]) -> Steps[None]:
        """Have letters moved. Raises an error if one was refused; letters before it were moved."""
        numbers = np.array([letter.seq for letter in letters], dtype="<u8").tobytes()
        message = RedriveDeadLetters(self._operations.topic, numbers, self._operations.group)
        left = len(letters)
        while left:
            # If a letter is refused after others, the reply counts those. The letter is then the first of the
            # next request and fails it.
            reply: DeadLettersRedriven = yield session.schedulers.ask(message)
            self._moved += reply.moved
            self._repeated += reply.repeated
            self._gone += reply.gone
            is_over = not reply.moved or self._operations.group
            left = 0 if is_over else left - reply.moved
        if self._rate is not None:
            yield session.pause(len(letters) / self._rate)

    def report(self) -> RedriveReport:
        """Return the counts."""
        return RedriveReport(self._operations.topic, self._dead, self._moved, self._repeated, self._gone)
