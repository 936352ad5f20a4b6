"""Workers over HTTP: views of nodes on queues and groups, which requests share.

A worker is a node name. Its requests come over many connections, and the gateway keeps no lease of it: the
engine compares node, seq and the lease id, if there is one. Therefore a gateway may end and start again
between a claim and its ack.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ringlog.actors.http_gateway.leases.settled_notices import SettledNotices
from ringlog.board.board import ProcessSlot
from ringlog.board.layout import HttpGatewayField
from ringlog.client.leases.group_lease_operations import GroupLeaseOperations
from ringlog.client.leases.lease_operations import LeaseOperations
from ringlog.clock import SystemClock
from ringlog.errors import InvalidRequest
from ringlog.limits import HTTP_WORKERS_MAX
from ringlog.tags import request_form

Settled = Callable[[Sequence[int], bool], None]
"""Takes the seqs of jobs that are done, or (True) that are jobs of their queue again."""


class Workers:
    """Views of nodes on queues and groups: open files between claims, and no leases.

    At most HTTP_WORKERS_MAX; the least recently used one is dropped.
    """

    def __init__(self, slot: ProcessSlot, elsewhere: SettledNotices | None) -> None:
        """`slot` is the page of this gateway. `elsewhere` tells other gateways; None = there are none."""
        self._slot, self._elsewhere = slot, elsewhere
        self._kept: OrderedDict[tuple[str, str, str], LeaseOperations] = OrderedDict()
        self._listeners: dict[tuple[str, str], list[Settled]] = {}

    def find(self, topic: str, node: str, group: str = "") -> LeaseOperations:
        """Return the view of a node. Raises UsageError if the node is invalid."""
        key = (topic, group, node)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = new_operations(topic, node, group)
            if len(self._kept) > HTTP_WORKERS_MAX:
                self._kept.popitem(last=False)[1].close()
        else:
            self._kept.move_to_end(key)
        return found

    def listen(self, topic: str, node: str, call: Settled) -> None:
        """Call `call(seqs, returned)` when this node settles jobs of a queue over HTTP, until `unlisten`."""
        self._listeners.setdefault((topic, node), []).append(call)
        self._slot.add(HttpGatewayField.WORK_STREAMS, 1)

    def unlisten(self, topic: str, node: str, call: Settled) -> None:
        """End what `listen` began."""
        calls = self._listeners[topic, node]
        calls.remove(call)
        self._slot.add(HttpGatewayField.WORK_STREAMS, -1)
        if not calls:
            del self._listeners[topic, node]

    def notify(self, topic: str, node: str, seqs: Sequence[int], *, returned: bool) -> None:
        """Report that a node settled jobs of a queue, to the work streams of all gateways.

        `returned`: They are jobs of the queue again, and may have other leases before this is heard of.
        """
        self.note_settled(topic, node, seqs, returned)
        if self._elsewhere is not None:
            self._elsewhere.report(topic, node, seqs, returned)

    def note_settled(self, topic: str, node: str, seqs: Sequence[int], returned: bool) -> None:
        """Report settled jobs to the work streams of this gateway."""
        for call in tuple(self._listeners.get((topic, node), ())):
            call(seqs, returned)


def new_operations(
    topic: str, node: str, group: str = "", *, release_on_exit: bool = False
) -> LeaseOperations:
    """Return a view of a node on a queue or an existing group. Its leases outlive the gateway by default."""
    if not node:
        raise InvalidRequest("node must not be empty", field="node")
    if not group:
        return LeaseOperations(topic, node, SystemClock(), release_on_exit=release_on_exit)
    name, tags = split_group(group)
    return GroupLeaseOperations(
        topic, name, "queue", node, SystemClock(), tags=tags, create=False, release_on_exit=release_on_exit
    )


def split_group(group: str) -> tuple[str, list[str] | None]:
    """Return name and tag filter of the key of a group: `name`, or `name@` and the filter."""
    name, _, text = group.partition("@")
    if text and text[0] not in "=^~":
        raise InvalidRequest(
            f"group must be a name, or name@ and a tag filter, got {group[:64]!r}", field="group"
        )
    return name, request_form(text)
