"""The rings through which one scheduler gives turns to clients on its host. Part of the shell.

A client asks for one when it connects. Who has none, because it is elsewhere, asked for none, or there was
no room or no descriptor, gets the same as a message.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Container

from ringlog.board.layout import BoardError
from ringlog.errors import RingError
from ringlog.limits import GRANT_RINGS_MAX
from ringlog.link.channel.grant_ring import GrantWriter, grants_prefix, remove_stale_grant_rings
from ringlog.logs import log_event

log = logging.getLogger("ringlog.scheduler")


class GrantRings:
    """By connection. Those of the incarnation before are removed: its connections are gone."""

    def __init__(self, shm_dir: str, scheduler: int, incarnation: int) -> None:
        self._shm_dir = shm_dir
        self._scheduler = scheduler
        self._prefix = f"{grants_prefix(scheduler)}{incarnation}-"
        self._made = 0
        self._rings: dict[bytes, GrantWriter] = {}
        self._fresh: dict[bytes, None] = {}
        """Asked for since `sweep` looked last, perhaps for a connection that has not subscribed yet."""
        remove_stale_grant_rings(shm_dir, scheduler)

    def __len__(self) -> int:
        return len(self._rings)

    def open(self, link: bytes) -> str:
        """Make one for a connection; its name, or "" when there is to be none. Asked again, since an answer
        was not heard in time, it is the same one: what goes into it must reach who asked."""
        if (known := self._rings.get(link)) is not None:
            self._fresh[link] = None
            return known.name
        if len(self._rings) >= GRANT_RINGS_MAX:
            return ""
        self._made += 1
        name = f"{self._prefix}{self._made}"
        try:
            self._rings[link] = GrantWriter(self._shm_dir, name, self._scheduler)
        except (BoardError, RingError) as e:
            log_event(log, logging.WARNING, "no ring for turns", reason=str(e))
            return ""
        self._fresh[link] = None
        return name

    def remove(self, link: bytes) -> str:
        """Remove a connection's ring, which it cannot use; its name from now on."""
        ring = self._rings.pop(link, None)
        if ring is not None:
            ring.close()
        return ""

    def write_grants(self, link: bytes, rows: bytes) -> bool:
        """Give turns to a connection; False when it has no ring."""
        ring = self._rings.get(link)
        if ring is None:
            return False
        ring.write_grants(array("Q", rows))
        return True

    def sweep(self, links: Container[bytes]) -> None:
        """Remove those of connections that have nothing subscribed any more; the latest wait for one more."""
        for link in [link for link in self._rings if link not in links and link not in self._fresh]:
            self._rings.pop(link).close()
        self._fresh.clear()

    def close(self) -> None:
        """Remove all of them."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
