"""Rings through which one scheduler sends grants to clients on its host. Part of the shell.

A client requests a ring when it connects. A client without a ring receives the same grants as messages. That
is the case for remote clients, if the client requests no ring, or if memory or descriptors are exhausted.
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

log: logging.Logger = logging.getLogger("ringlog.scheduler")


class GrantRings:
    """Grant rings by connection.

    The constructor removes the rings of earlier incarnations, whose connections ended.
    """

    def __init__(self, shm_dir: str, scheduler: int, incarnation: int) -> None:
        self._shm_dir = shm_dir
        self._scheduler = scheduler
        self._prefix = f"{grants_prefix(scheduler)}{incarnation}-"
        self._made = 0
        self._rings: dict[bytes, GrantWriter] = {}
        self._fresh: dict[bytes, None] = {}
        """Connections that requested a ring since the last sweep. They may not have subscribed yet."""
        remove_stale_grant_rings(shm_dir, scheduler)

    def __len__(self) -> int:
        return len(self._rings)

    def open(self, link: bytes) -> str:
        """Create the ring of a connection and return its name, or "" if it gets none.

        A repeated request, after a lost reply, returns the same ring: grants may already be in it.
        """
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
            log_event(log, logging.WARNING, "cannot create grant ring", reason=str(e))
            return ""
        self._fresh[link] = None
        return name

    def remove(self, link: bytes) -> str:
        """Remove the ring of a connection that cannot use it; return "", its name from now on."""
        ring = self._rings.pop(link, None)
        if ring is not None:
            ring.close()
        return ""

    def write_grants(self, link: bytes, rows: bytes) -> bool:
        """Write grants to the ring of a connection; return False if it has no ring."""
        ring = self._rings.get(link)
        if ring is None:
            return False
        ring.write_grants(array("Q", rows))
        return True

    def sweep(self, links: Container[bytes]) -> None:
        """Remove rings of connections without subscriptions.

        Rings requested since the last sweep are kept.
        """
        for link in [link for link in self._rings if link not in links and link not in self._fresh]:
            self._rings.pop(link).close()
        self._fresh.clear()

    def close(self) -> None:
        """Remove all rings."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
