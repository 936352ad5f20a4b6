"""The records of a topic."""

from __future__ import annotations

from ringlog.client import Client, Record


def records(client: Client, topic: str) -> list[Record]:
    return [item for item in client.reader(topic) if isinstance(item, Record)]


def payloads(client: Client, topic: str) -> list[bytes]:
    return [record.data for record in records(client, topic)]
