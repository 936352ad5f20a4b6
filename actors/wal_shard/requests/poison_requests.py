"""Requests that ended a shard: what two incarnations had in hand when they broke, a third refuses.

A shard stops at what it does not expect, and its successor begins with what is on disk; a client sends what
was not answered once more. So a request that no shard survives would end one after another, until the
supervisor gives the shard up, with all its topics. What was in hand is noted in shared memory, which outlives
a process and not the engine. Once is nobody's fault: what one incarnation did not survive the next one takes.
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
    """Those of one shard. The file has the fingerprints of requests in hand, one a death, the latest last."""

    def __init__(self, shm_dir: str, shard: int) -> None:
        self._path = os.path.join(shm_dir, f"deadly-{shard:02d}")
        self._deaths = self._read()
        times = Counter(self._deaths)
        self._refused = frozenset(each for each in times if times[each] >= POISON_CRASHES)

    def require_not_poison(self, message: Message, attachment: bytes | bytearray | None = None) -> None:
        """Raise Internal for one that must not be taken again."""
        if self._refused and fingerprint(message, attachment) in self._refused:
            raise Internal(
                "the shard ended each time it was asked this",
                kind=type(message).__name__,
                times=POISON_CRASHES,
            )

    def record_crash(self, message: Message, attachment: bytes | bytearray | None = None) -> None:
        """This was in hand when the incarnation broke. What cannot be noted is forgotten: the process ends
        for another reason."""
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
    """Of what is asked, whoever asks it and under whatever number."""
    state = xxhash.xxh3_64(type(message).__name__.encode() + msgspec.msgpack.encode(message))
    state.update(bytes(attachment or b""))
    return state.intdigest()
