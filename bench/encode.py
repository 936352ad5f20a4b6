"""How fast do records become frames? 10,000 payloads of 100 bytes, a list of bytes to a checksummed frame.

Compared in the same run with the least that any framing must do: join the bytes and hash them.
`python -m bench.encode` prints the row.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import xxhash

from ringlog.frame import encode_records, frame

RECORDS = 10_000
PAYLOAD_BYTES = 100
ROUNDS = 15
CALLS_PER_ROUND = 20
REACH = 10_000_000.0


def rows() -> list[dict[str, Any]]:
    """Result rows; `spread` is the interquartile range over the median, `ratio` is value / against."""
    payloads = [index.to_bytes(4, "little") * (PAYLOAD_BYTES // 4) for index in range(RECORDS)]

    def encode() -> None:
        frame(encode_records(payloads), topic_id=1)

    def floor() -> None:
        xxhash.xxh3_64_intdigest(b"".join(payloads))

    ours: list[float] = []
    bare: list[float] = []
    for _ in range(ROUNDS):  # interleaved, so that both meet the same neighbours
        ours.append(_rate(encode))
        bare.append(_rate(floor))
    value, against = statistics.median(ours), statistics.median(bare)
    low, _, high = statistics.quantiles(ours, n=4)
    return [
        {
            "id": f"encode_{PAYLOAD_BYTES}B_x_{RECORDS}",
            "value": value,
            "unit": "records/s",
            "spread": (high - low) / value,
            "against": against,
            "ratio": value / against,
            "reach": REACH,
            "met": value >= REACH,
        }
    ]


def _rate(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
        call()
    return RECORDS * CALLS_PER_ROUND / (time.perf_counter() - began)


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
