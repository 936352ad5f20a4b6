"""Independent decoder of `meta/log-NN`, written from docs/reference/format.md only."""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from ringlog.verify.findings import FileReport

_ENTRY_BYTES = 4096
_MAGIC = b"RLOGREG1"
_PAIRS_AT = 88
_PAIR_BYTES = 16


def verify_register(path: str, data: bytes) -> FileReport:
    """Check a register by itself. `extra["newest"]` of the report has (number of shards, file id) pairs."""
    report = FileReport(path, "register", bytes=len(data))
    report.extra = {"shard": -1, "newest": []}
    if len(data) != 2 * _ENTRY_BYTES:
        report.add_damage(f"has {len(data)} bytes, expected {2 * _ENTRY_BYTES}")
        return report
    entries = [data[:_ENTRY_BYTES], data[_ENTRY_BYTES:]]
    found = [_entry(entry) for entry in entries]
    valid = [each for place, each in enumerate(found) if each and each["number"] % 2 == place]
    if not valid:
        report.add_damage("both entries are invalid")
        return report
    newest = max(valid, key=lambda each: int(each["number"]))
    for place, entry in enumerate(entries):
        # Before the second update, the other entry is blank.
        if found[place] not in valid and (entry.strip(b"\0") or newest["number"] > 1):
            report.add_remark("one entry is invalid: the other one is used", place * _ENTRY_BYTES)
    if len(valid) == len(entries) and abs(valid[0]["number"] - valid[1]["number"]) != 1:
        report.add_remark("its entries are not consecutive: one of them is stale")
    if newest["version"] != 1:
        report.add_damage(f"has unknown version {newest['version']}")
        return report
    report.extra = {"shard": newest["shard"], "newest": newest.pop("newest")}
    if path != f"meta/log-{newest['shard']:02d}":
        report.add_damage(f"has the wrong name: it belongs to shard {newest['shard']}")
    report.header = newest
    return report


def _entry(data: bytes) -> dict[str, Any] | None:
    """Return the fields of an entry; None if it is invalid."""
    (stored,) = struct.unpack_from("<Q", data, _ENTRY_BYTES - 8)
    if data[:8] != _MAGIC or xxhash.xxh3_64_intdigest(data[: _ENTRY_BYTES - 8]) != stored:
        return None
    version, shard, number = struct.unpack_from("<IIQ", data, 8)
    last_id, last_epoch, file_bytes, shards, file, earlier = struct.unpack_from("<6Q", data, 40)
    if earlier > (_ENTRY_BYTES - 8 - _PAIRS_AT) // _PAIR_BYTES:
        return None
    pairs = [struct.unpack_from("<QQ", data, _PAIRS_AT + i * _PAIR_BYTES) for i in range(earlier)]
    return {
        "version": version, "shard": shard, "number": number, "engine_id": data[24:40].hex(),
        "last_id": last_id, "last_epoch": last_epoch, "file_bytes": file_bytes, "shards": shards,
        "file": file, "newest": [*([(shards, file)] if file else []), *pairs],
    }  # fmt: skip
