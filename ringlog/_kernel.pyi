"""native/kernel.c; what each function does stands there."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

def encode(
    payloads: Sequence[bytes], records: int, header: bytes, record_max: int, total_max: int, /
) -> tuple[bytearray, bytes] | None: ...
def take(
    buffer: Buffer, frames_max: int, frame_max: int, seq_max: int, position: int, /
) -> tuple[bytearray, bytearray, int, int, int, int, int, int, int, int] | None: ...
def number(
    words: Any, entries: Any, start: int, stop: int, first: int, stamp: int, epoch: int, durability: int, /
) -> int: ...
def seal(buffer: Buffer, offsets: Any, words: Any, start: int, stop: int, salt: int, /) -> int: ...
def look(words: list[memoryview], seen: list[int], ns: int, /) -> bool: ...
def stamp(
    buffer: Buffer,
    offsets: Any,
    topic_id: int,
    epoch: int,
    producer_id: int,
    first_seq: int,
    follows: bool,
    /,
) -> int: ...
