"""Lease histories built by hand, for the tests of their judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from chaos.leases.journal import Did, Outcome

MS = 1_000_000
ONE = 7
"""The record that the histories are about."""


@dataclass
class LeaseStory:
    """A history built by hand, with times in ms. Each record's value is its seq plus six."""

    rows: list[Any] = field(default_factory=list)

    def add(self, at: int, did: Did, client: int, *, outcome: Outcome = Outcome.UNKNOWN, seq: int = 0,
            begun: int = 0, value: int = ONE, deliveries: int = 0) -> Self:  # fmt: skip
        self.rows.append((at * MS, begun * MS, client, 0, did, outcome, 0, value, seq, deliveries))
        return self

    def put(self, at: int = 0, records: int = 1) -> Self:
        for n in range(records):
            self.add(at, Did.PUT, 1, value=ONE + n)
            self.add(at + 1, Did.PUT_END, 1, outcome=Outcome.OK, seq=1 + n, value=ONE + n)
        return self

    def claim(self, at: int, client: int, times: int = 1, *, did: Did = Did.CLAIMED, seq: int = 1,
              begun: int | None = None, value: int = ONE) -> Self:  # fmt: skip
        begun = at - 1 if begun is None else begun
        return self.add(at, did, client, seq=seq, begun=begun, deliveries=times, value=value)

    def ack(self, at: int, client: int, outcome: Outcome | None = Outcome.OK, value: int = ONE) -> Self:
        self.add(at, Did.ACK, client, value=value)
        return self if outcome is None else self.add(at + 1, Did.END, client, outcome=outcome, value=value)

    def floor(self, at: int, seq: int) -> Self:
        return self.add(at, Did.FLOOR, 9, seq=seq, begun=at - 1)

    def take(self, at: int, client: int) -> Self:
        return self.add(at, Did.TAKEN, client, begun=at - 1)

    def read(self, at: int, client: int, seq: int, begun: int) -> Self:
        return self.add(at, Did.READ, client, seq=seq, begun=begun - 1, value=ONE - 1 + seq)

    def commit(
        self, at: int, client: int, seq: int, begun: int, outcome: Outcome | None = Outcome.OK
    ) -> Self:
        self.add(at, Did.COMMIT, client, seq=seq, begun=begun - 1)
        if outcome is None:
            return self
        return self.add(at + 1, Did.COMMIT_END, client, seq=seq, begun=begun - 1, outcome=outcome)
