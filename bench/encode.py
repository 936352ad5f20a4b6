"""Rate of encoding: 10,000 payloads of 100 bytes, from a list of bytes to a checksummed frame.

The floor, measured in the same rounds, is the minimum of any framing: join the bytes and hash them. Run it
with an allocator that keeps freed memory (ringlog/frame/malloc_tuning.py), as processes that make many frames
should.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import xxhash

from bench.rows import Row, row
from ringlog.frame import encode_records, frame, raise_malloc_trim_threshold

RECORDS = 10_000
PAYLOAD_BYTES = 100
ROUNDS = 15
CALLS_PER_ROUND = 20
REACH_RECORDS_PER_S = 10_000_000.0


def rows(only: str = "") -> list[Row]:
    """Measure. Returns one row, or none if its name does not contain `only`."""
    name = f"encode_{PAYLOAD_BYTES}B_x_{RECORDS}"
    if only not in name:
        return []
    payloads = [index.to_bytes(4, "little") * (PAYLOAD_BYTES // 4) for index in range(RECORDS)]

    def encode() -> None:
        frame(encode_records(payloads), topic_id=1)

    def floor() -> None:
        xxhash.xxh3_64_intdigest(b"".join(payloads))

    raise_malloc_trim_threshold()
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(ROUNDS):  # interleaved, so that both meet the same load of the host
        ours.append(_rate(encode))
        bare.append(_rate(floor))
    return [row(name, "records/s", ours, bare, reach={"min": REACH_RECORDS_PER_S})]


def _rate(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
        call()
    return RECORDS * CALLS_PER_ROUND / (time.perf_counter() - began)
