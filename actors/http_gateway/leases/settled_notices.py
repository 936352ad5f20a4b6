"""Tell the other HTTP gateways which jobs were settled here: their work streams have free slots then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ringlog.actors.http_gateway.siblings.messages import JobsSettled, SettledJobs
from ringlog.actors.http_gateway.siblings.siblings import Siblings
from ringlog.board.layout import HttpGatewayField
from ringlog.limits import HTTP_SETTLED_SEQS_MAX


class SettledNotices:
    """Collects the jobs that are settled in one pass of the event loop, and tells the gateways with work
    streams.

    At most HTTP_SETTLED_SEQS_MAX. A notice may be lost: a work stream asks the engine now and then anyway.
    """

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self._jobs: list[SettledJobs] = []
        self._count = 0

    def report(self, topic: str, node: str, seqs: Sequence[int]) -> None:
        """Report that a node settled jobs of a queue."""
        room = HTTP_SETTLED_SEQS_MAX - self._count
        if not seqs or room <= 0 or not self._listeners():
            return
        if not self._jobs:
            asyncio.get_running_loop().call_soon(self._send)
        self._jobs.append(SettledJobs(topic, node, list(seqs[:room])))
        self._count += len(seqs)

    def _listeners(self) -> list[int]:
        pages = self._siblings.pages
        return [number for number, page in pages.items() if page.get(HttpGatewayField.WORK_STREAMS)]

    def _send(self) -> None:
        notice = JobsSettled(self._jobs)
        self._jobs, self._count = [], 0
        for number in self._listeners():
            self._siblings.tell(number, notice)
