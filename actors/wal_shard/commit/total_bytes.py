"""Accounted bytes of all live records of the engine, which `limits.max_total_bytes` bounds. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ringlog.topic.directory import TopicDirectory


class TotalBytes:
    """Room for new records, over all shards."""

    def __init__(self, directory: TopicDirectory, most: int, publish: Callable[[int], int]) -> None:
        """`most` is the limit in bytes; 0 = none.

        `publish` publishes the bytes of this shard, and returns those of all other shards.
        """
        self.most: int = most
        self._directory = directory
        self._publish = publish

    def room_for(self, size: int) -> int:
        """Return how many bytes may be added, `size` or more if that many may.

        The shard first publishes its new total and then adds up the totals of all shards. If several shards
        add the last bytes at the same time, at most one of them succeeds.
        """
        if not self.most:
            return size
        own = self._directory.live_bytes
        room = self.most - own - self._publish(own + size)
        if room < size:
            self._publish(own)
        return max(room, 0)

    def add(self, size: int) -> None:
        """Count the records that were staged."""
        self._directory.live_bytes += size
