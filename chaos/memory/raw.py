"""A producer without the client library: it opens rings and writes arbitrary words and bytes to them."""

from __future__ import annotations

import mmap
import os
import random
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash
import zmq

from ringlog.board.processes import SUPERVISOR, shard_bell, socket_of
from ringlog.drill.checks import GuaranteeBroken, require
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.messages import RingClose, RingClosed, RingOpen, RingOpened
from ringlog.envelope.wire import decode, encode
from ringlog.frame import layout as frame_layout
from ringlog.frame import seal
from ringlog.ring import layout
from ringlog.ring.doorbell import BellRinger
from ringlog.ring.producer import RingProducer

WAIT_S = 10.0
LOOK_S = 0.002
RING_BYTES = 64 << 10


class Opener:
    """A socket to the supervisor that opens rings in the name of any client and process."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(socket_of(info.shm_dir, SUPERVISOR))
        self._corr = 0

    def ask(self, message: Any) -> Any:
        """Return the supervisor's reply, possibly an ErrorReply.

        Raises GuaranteeBroken after WAIT_S without a reply.
        """
        self._corr += 1
        self._socket.send(encode(message, self._corr))
        while self._socket.poll(int(WAIT_S * 1_000)):
            envelope = decode(self._socket.recv())
            if envelope.corr == self._corr:
                return envelope.message
        raise GuaranteeBroken(f"the supervisor did not answer {type(message).__name__}")

    def open(self, shard: int, ring_bytes: int = RING_BYTES, pid: int = 0) -> RawRing:
        """Open a ring that its shard drains."""
        answer = self.ask(RingOpen(f"raw-{self._corr}", pid or os.getpid(), shard, ring_bytes))
        require(isinstance(answer, RingOpened), f"no ring: {answer}")
        return RawRing(self, shard, answer.ring)

    def close(self, name: str) -> None:
        """Close a ring."""
        require(isinstance(self.ask(RingClose(name)), RingClosed), "a ring is not closed")

    def __enter__(self) -> Opener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(0)
        self._context.term()


class RawRing:
    """A ring with access to every byte."""

    def __init__(self, opener: Opener, shard: int, name: str) -> None:
        self._opener = opener
        self.name = name
        self.path = Path(opener.info.shm_dir) / name
        self.producer = RingProducer.attach(str(self.path), engine_id=opener.info.engine_id)
        self.memory = self.producer._memory
        self._bell = BellRinger(shard_bell(opener.info.shm_dir, shard))

    def ring(self) -> None:
        """Wake up the shard."""
        self._bell.ring()

    def store_word(self, word: layout.RingWord, value: int) -> None:
        """Store any value in a live word."""
        self.memory.store(word, value & 0xFFFFFFFFFFFFFFFF)

    def wait_closed(self, within_s: float = WAIT_S) -> bool:
        """Whether the shard closes the ring within that time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self.memory.load(layout.RingWord.CONSUMER_STATE) == layout.RingConsumerState.CLOSED:
                return True
            time.sleep(LOOK_S)
        return False

    def close(self) -> None:
        """Unmap and close the ring."""
        self._bell.close()
        self.producer.close()
        self._opener.close(self.name)


class Scribbler:
    """A ring of another client, mapped by path, to overwrite its words and bytes at any time."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
            self.identity = layout.decode_identity(self._map[: layout.IDENTITY_BYTES], str(path))
        self._words = memoryview(self._map)[: layout.HEADER_BYTES].cast("Q")

    def word(self, word: layout.RingWord) -> int:
        """Return a live word."""
        return self._words[word]

    def put(self, word: layout.RingWord, value: int) -> None:
        """Overwrite a live word."""
        self._words[word] = value & 0xFFFFFFFFFFFFFFFF

    def put_bytes(self, offset: int, data: bytes) -> None:
        """Overwrite bytes of the file."""
        self._map[offset : offset + len(data)] = data

    def first_frame(self) -> bytes:
        """Return the frame at the start of the data area. Valid for a ring that has not wrapped around."""
        start = layout.HEADER_BYTES
        length = int.from_bytes(self._map[start : start + 4], "little") + frame_layout.LEN_FIELD_BYTES
        return bytes(self._map[start : start + length])

    def close(self) -> None:
        """Unmap the ring."""
        self._words.release()
        self._map.close()


def any_word(chance: random.Random, near: int) -> int:
    """Return a value: random, small, or close to `near`."""
    return chance.choice(
        (
            chance.getrandbits(64),
            chance.getrandbits(8),
            near + chance.randrange(-80, 81),
            near + 8 * chance.randrange(-20, 21),
            near ^ (1 << chance.randrange(64)),
            0,
            (1 << 64) - 1,
        )
    )


def twisted(frame: bytes, chance: random.Random, producer_id: int) -> bytearray:
    """Return a valid frame with some header words or body bytes changed, with or without new checksums."""
    made = bytearray(frame)
    words = memoryview(made)[: frame_layout.HEADER_BYTES].cast("Q")
    words[frame_layout.W_PRODUCER_ID] = producer_id
    for _ in range(chance.randrange(1, 4)):
        if chance.random() < 0.7:
            at = chance.randrange(frame_layout.HEADER_WORDS)
            words[at] = any_word(chance, words[at]) & 0xFFFFFFFFFFFFFFFF
        else:
            words.release()
            at = chance.randrange(frame_layout.HEADER_BYTES, len(made))
            made[at] ^= 1 << chance.randrange(8)
            words = memoryview(made)[: frame_layout.HEADER_BYTES].cast("Q")
    if chance.random() < 0.7:
        # Valid checksums, so that later checks have to find the changes.
        words[frame_layout.W_BODY_XXH3] = xxhash.xxh3_64_intdigest(made[frame_layout.HEADER_BYTES :])
        words.release()
        seal(made, 0)
    else:
        words.release()
    return made
