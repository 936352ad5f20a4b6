"""Tell the other HTTP gateways which jobs were settled here: their work streams have free slots then."""

from __future__ import annotations

from collections.abc import Sequence

from ringlog.actors.http_gateway.siblings import Siblings
from ringlog.board.layout import HttpGatewayField
from ringlog.envelope.messages import JobsSettled, SettledJobs
from ringlog.limits import HTTP_SETTLED_ROWS_MAX, HTTP_SETTLED_SEQS_MAX


class UnsentJobs:
    """Settled jobs that wait for the next notice to one gateway. Those beyond the limits are dropped."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, bool], list[int]] = {}
        self._count = 0

    def add(self, topic: str, node: str, seqs: Sequence[int], returned: bool) -> None:
        """Add the jobs that a node has settled, or returned to their queue."""
        room, key = HTTP_SETTLED_SEQS_MAX - self._count, (topic, node, returned)
        if room > 0 and (key in self.rows or len(self.rows) < HTTP_SETTLED_ROWS_MAX):
            self.rows.setdefault(key, []).extend(seqs[:room])
            self._count += len(seqs)


class SettledNotices:
    """Collects settled jobs for the gateways with work streams, and tells them.

    A notice may be lost: a work stream asks the engine now and then anyway.
    """

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self._unsent: dict[int, UnsentJobs] = {}

    def report(self, topic: str, node: str, seqs: Sequence[int], returned: bool) -> None:
        """Report that a node settled jobs of a queue, or returned them to it."""
        for number, page in self._siblings.pages.items() if seqs else ():
            if page.get(HttpGatewayField.WORK_STREAMS):
                self._unsent.setdefault(number, UnsentJobs()).add(topic, node, seqs, returned)
                self._siblings.tell(number, self._take)

    def _take(self, number: int) -> JobsSettled | None:
        unsent = self._unsent.pop(number, None)
        if unsent is None:
            return None
        return JobsSettled(
            [
                SettledJobs(topic, node, seqs, returned)
                for (topic, node, returned), seqs in unsent.rows.items()
            ]
        )
