"""Poison requests: if two incarnations crashed while they handled the same request, the next one refuses it.

A shard exits on an unexpected error, and its successor recovers from disk. The client then resends the
unanswered request. Without a check, one such request would crash every incarnation, until the supervisor
gives up the shard and all its topics. The shard therefore records the request of a crash in shared memory,
which survives the process but not the engine. One crash is not enough evidence, so the next incarnation still
accepts the request.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import msgspec
import xxhash

from ringlog.envelope.messages import Message
from ringlog.errors import Internal, RinglogError
from ringlog.limits import POISON_CRASHES, POISON_CRASHES_REMEMBERED_MAX
from ringlog.shm import make_file, open_file, remove_file

_WORD = 8
_MAGIC = b"RLDEADLY"


class PoisonRequests:
    """Poison requests of one shard.

    A file contains one request fingerprint for each crash, the latest last.
    """

    def __init__(self, shm_dir: str, shard: int) -> None:
        self._path = os.path.join(shm_dir, f"deadly-{shard:02d}")
        self._deaths = self._read()
        times = Counter(self._deaths)
        self._refused = frozenset(each for each in times if times[each] >= POISON_CRASHES)

    def require_not_poison(self, message: Message, attachment: bytes | bytearray | None = None) -> None:
        """Raise Internal for a request that crashed POISON_CRASHES incarnations."""
        if self._refused and fingerprint(message, attachment) in self._refused:
            raise Internal(
                f"the shard crashed {POISON_CRASHES} times at this request and refuses it: report a bug",
                kind=type(message).__name__,
                times=POISON_CRASHES,
            )

    def record_crash(self, message: Message, attachment: bytes | bytearray | None = None) -> None:
        """Record the request that was handled when the incarnation crashed.

        Errors are ignored, so that they do not hide the original error that ends the process.
        """
        deaths = [*self._deaths, fingerprint(message, attachment)][-POISON_CRASHES_REMEMBERED_MAX:]
        data = _MAGIC + b"".join(each.to_bytes(_WORD, "little") for each in deaths)
        with contextlib.suppress(RinglogError, OSError):
            remove_file(self._path)
            make_file(self._path, len(data), data, RinglogError)

    def _read(self) -> list[int]:
        with contextlib.suppress(RinglogError, OSError):
            fd, size = open_file(self._path, RinglogError, writable=False)
            try:
                data = os.pread(fd, min(size, len(_MAGIC) + POISON_CRASHES_REMEMBERED_MAX * _WORD), 0)
            finally:
                os.close(fd)
            if data.startswith(_MAGIC):
                words = data[len(_MAGIC) :]
                starts = range(0, len(words), _WORD)
                return [int.from_bytes(words[at : at + _WORD], "little") for at in starts]
        return []


def fingerprint(message: Message, attachment: bytes | bytearray | None = None) -> int:
    """Return a hash of a request's content, without its sender and its correlation id."""
    state = xxhash.xxh3_64(type(message).__name__.encode() + msgspec.msgpack.encode(message))
    state.update(bytes(attachment or b""))
    return state.intdigest()
