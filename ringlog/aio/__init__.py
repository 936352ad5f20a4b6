"""ringlog for asyncio: the same names as `ringlog.client`, awaited where the other one waits.

    async with ringlog.aio.connect() as rl:
        await rl.append("orders", b"…")
        async with rl.producer("orders") as out:
            ticket = await out.send(b"…")
            appended = await ticket
        async for item in rl.reader("orders", follow=True):
            ...

A client belongs to the loop in which it is first used; any other raises WrongLoop. It reads its
descriptors by `loop.add_reader`, so it runs under every loop that has that, uvloop included.
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
