"""Options of a producer, checked, and parsers for durability classes, codecs and producer names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xxhash

from ringlog.client.requests.validation import check_bool, check_int, check_str
from ringlog.client.requests.validation import check_payload_codec as codec_of
from ringlog.errors import UsageError
from ringlog.limits import BATCH_RECORDS_MAX, REQUEST_BYTES_MAX
from ringlog.payload import RAW, PayloadCodec
from ringlog.types import SESSION_BIT, Codec, Durability


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Checked options of a producer."""

    linger_ms: float = 2.0
    max_frame_records: int = 4096
    max_frame_bytes: int = 1 << 20
    max_buffer_bytes: int = 32 << 20
    on_full: str = "wait"
    durability: Durability | None = None
    codec: Codec | None = None
    """None uses the topic's `compression`, once it is known."""
    payload: PayloadCodec[Any] = RAW
    create: bool = True
    name: str | None = None
    disable_backpressure: bool = False

    def __post_init__(self) -> None:
        bounds = (
            ("linger_ms", self.linger_ms, 0, 60_000),
            ("max_frame_records", self.max_frame_records, 1, BATCH_RECORDS_MAX),
            ("max_frame_bytes", self.max_frame_bytes, 1, REQUEST_BYTES_MAX),
            ("max_buffer_bytes", self.max_buffer_bytes, 1, 1 << 40),
        )
        for name, value, low, high in bounds:
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise UsageError(
                    f"{name} must be a number from {low} to {high}, got {repr(value)[:64]}", found=value,
                    min=low, max=high,
                )  # fmt: skip
            if name != "linger_ms":
                check_int(value, name)
        if check_str(self.on_full, "on_full") not in {"wait", "raise"}:
            raise UsageError(f"on_full must be wait or raise, got {self.on_full[:64]!r}", found=self.on_full)
        codec_of(self.payload)
        check_bool(self.create, "create")
        check_bool(self.disable_backpressure, "disable_backpressure")
        if self.name is not None:
            named_producer_id(self.name)


CLOSED = "the producer is closed"
OF_PARENT = (
    "a named producer cannot be used in a forked child: open a producer there with another name, or "
    "without one"
)


def parse_durability(value: Durability | str | None) -> Durability | None:
    """Return a durability class, given itself or its name. Raises UsageError, which names the four
    classes."""
    if value is None or isinstance(value, Durability):
        return value
    try:
        return Durability.parse(value)
    except (ValueError, AttributeError) as e:
        raise UsageError(str(e)) from None


def parse_codec(value: Codec | str | None) -> Codec | None:
    """Return a frame codec, given itself or its name. Raises UsageError."""
    if value is None or isinstance(value, Codec):
        return value
    try:
        return Codec[value.upper()]
    except (KeyError, AttributeError):
        raise UsageError(f"codec must be none, lz4 or zstd, got {repr(value)[:64]}", found=value) from None


def named_producer_id(name: str) -> int:
    """Return the id of a named producer. It depends only on the name; its top bit is clear, and it is never
    0."""
    if not check_str(name, "name"):
        raise UsageError("name must not be empty")
    return (xxhash.xxh3_64_intdigest(name.encode()) & (SESSION_BIT - 1)) or 1
