"""Asyncio client: the names of `ringlog.client`, with coroutines where the synchronous client blocks.

    async with ringlog.aio.connect() as rl:
        await rl.append("orders", b"…")
        async with rl.producer("orders") as out:
            ticket = await out.send(b"…")
            appended = await ticket
        async for item in rl.reader("orders", follow=True):
            ...

A client belongs to the event loop in which it is first used. A call from any other loop raises WrongLoop. The
client watches its descriptors with `loop.add_reader`, so it runs under every loop that supports this,
including uvloop.
"""

from __future__ import annotations

from ringlog.aio.client import Client, connect
from ringlog.aio.group import Group
from ringlog.aio.job import Job
from ringlog.aio.producer import Producer
from ringlog.aio.queue import Queue
from ringlog.aio.reader import Reader
from ringlog.aio.routers import Routers
from ringlog.aio.tailer import Tailer
from ringlog.aio.ticket import Ticket
from ringlog.aio.topics import Topics
from ringlog.aio.watch import Watch

__all__ = [
    "Client", "Group", "Job", "Producer", "Queue", "Reader", "Routers", "Tailer", "Ticket", "Topics", "Watch",
    "connect",
]  # fmt: skip
