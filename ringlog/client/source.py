"""Where pages come from: the engine's files when it runs on this host, else the gateway.

Both answer `fetch` with a Portion: what to announce, frames that hold the records behind it, and how far
that covers the topic. Frames that a page did not use are kept, so that small pages do not read twice.
Every frame was verified by its checksums on this side of the wire, whoever read it (architecture 2).
"""

from __future__ import annotations

from ringlog.client.connection import Connection
from ringlog.client.local_source import LocalSource
from ringlog.client.portion import Source
from ringlog.client.remote_source import RemoteSource


def open_source(
    connection: Connection, topic: str, *, is_settling: bool = False, is_following: bool = False
) -> Source:
    """Choose by transport. `is_settling`: whoever reads to the head without waiting finds the copies of what
    was acked at the sources of the topic's routers (RT-20). `is_following`: whoever waits for more keeps the
    topic in use until the source is closed (F39)."""
    if connection.transport == "ring":
        return LocalSource(connection, topic, is_settling=is_settling, is_following=is_following)
    return RemoteSource(connection, topic, is_settling=is_settling, is_following=is_following)
