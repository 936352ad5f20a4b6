"""Names and headers of WAL files."""

from __future__ import annotations

import random

import pytest

from ringlog.errors import CorruptData
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.storage.layout import (
    WalHeader,
    decode_wal_header,
    header_verifies,
    pack_file,
    parse_shard_dir,
    parse_wal_name,
    shard_dir,
    unpack_file,
    wal_name,
)

HEADER = WalHeader(2, 3, 7, 41, 99, b"b" * 16, b"e" * 16, 123, 1 << 20, pack_file(40, 1), 8_192, 77, 1)


def test_a_header_decodes_to_the_encoded_values():
    data = HEADER.encode()
    assert len(data) == WAL_HEADER_BYTES
    assert decode_wal_header(data, "x") == HEADER
    assert HEADER.file_id == pack_file(41, 7)


def test_any_changed_byte_of_a_header_is_detected():
    """A header is protected by its checksum (RF-70)."""
    data = HEADER.encode()
    rng = random.Random(1)
    for at in [*range(128), *rng.sample(range(WAL_HEADER_BYTES), 200), *range(4_088, 4_096)]:
        changed = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        assert not header_verifies(changed)
        with pytest.raises(CorruptData, match="checksum mismatch") as refused:
            decode_wal_header(changed, "wal/shard-00/x")
        assert refused.value.detail["file"] == "wal/shard-00/x"


@pytest.mark.parametrize("length", [0, 1, 4_095])
def test_a_short_header_is_refused(length):
    assert not header_verifies(HEADER.encode()[:length])
    with pytest.raises(CorruptData, match="must have at least 4096 bytes"):
        decode_wal_header(HEADER.encode()[:length], "x")


def test_a_blank_header_does_not_verify():
    assert not header_verifies(bytes(WAL_HEADER_BYTES))


def test_wal_names_and_file_ids_order_by_incarnation_and_number():
    assert parse_wal_name(wal_name(12, 3)) == (12, 3)
    assert parse_shard_dir(shard_dir(7)) == 7
    for name in ("wal-1.log", "wal-1-2.log.tmp", "xwal-1-2.log", "wal--1-2.log", "LOCK"):
        assert parse_wal_name(name) is None
    for name in ("shard-", "shard-x", "shards-1"):
        assert parse_shard_dir(name) is None
    pairs = [(1, 0), (1, 5), (2, 0), (300, 1 << 20)]
    packed = [pack_file(*pair) for pair in pairs]
    assert packed == sorted(packed)
    assert [unpack_file(each) for each in packed] == pairs
    assert 0 not in packed
