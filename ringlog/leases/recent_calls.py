"""The latest changes of a group by call number, so that a repeat of a call gets the same reply. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec import structs

from ringlog.leases.change import LeaseChange
from ringlog.limits import LEASE_CALL_ROWS_KEPT_MAX, LEASE_CALLS_KEPT_MAX, LEASE_CALLS_PER_NODE_MAX


class RecentCalls:
    """Bounded by the number of calls in total and of one node, and by the numbers in their changes."""

    def __init__(self) -> None:
        self._changes: OrderedDict[int, LeaseChange] = OrderedDict()
        self._rows = 0
        self._of_node: dict[str, OrderedDict[int, None]] = {}
        """Calls by node, the oldest first."""

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[LeaseChange]:
        return iter(self._changes.values())

    def find(self, call: int) -> LeaseChange | None:
        """Return the change of an earlier call with this number; None if it is not known."""
        return self._changes.get(call) if call else None

    def restore_changes(self, changes: Iterable[LeaseChange]) -> None:
        """Remember these changes."""
        for change in changes:
            self.remember_change(change)

    def remember_change(self, change: LeaseChange) -> None:
        """Remember a change, for a repeat of its request."""
        if change.call in self._changes:
            self._forget(change.call)
        if change.reason:
            change = structs.replace(change, reason="")
        self._changes[change.call] = change
        self._rows += _numbers_in(change)
        of_node = self._of_node.setdefault(change.node, OrderedDict())
        of_node[change.call] = None
        if len(of_node) > LEASE_CALLS_PER_NODE_MAX:
            self._forget(next(iter(of_node)))
        while len(self._changes) > LEASE_CALLS_KEPT_MAX or self._rows > LEASE_CALL_ROWS_KEPT_MAX:
            self._forget(next(iter(self._changes)))

    def _forget(self, call: int) -> None:
        old = self._changes.pop(call)
        self._rows -= _numbers_in(old)
        of_node = self._of_node[old.node]
        del of_node[call]
        if not of_node:
            del self._of_node[old.node]


def _numbers_in(change: LeaseChange) -> int:
    return len(change.rows) + len(change.skipped) + len(change.exhausted)
