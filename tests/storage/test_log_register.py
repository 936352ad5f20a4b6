"""The log register: its bytes match docs/reference/format.md, and a damaged register is detected."""

from __future__ import annotations

import struct

import pytest
import xxhash

from ringlog.errors import CorruptData
from ringlog.storage.layout import ids_upper_bound
from ringlog.storage.log_register import (
    ENTRY_BYTES,
    LogRegister,
    RegisterEntry,
    decode_register,
    encode_register,
    parse_register_name,
    read_register,
    register_name,
)
from ringlog.testing.disk import SimulatedDisk
from ringlog.verify.register_decoder import verify_register

ENGINE = bytes(range(16))
ENTRY = RegisterEntry(3, 7, ENGINE, 40, 5, 1 << 20, 4, 9 << 24 | 2, ((1, 2 << 24), (8, 5 << 24 | 1)))
GOLDEN = (
    b"RLOGREG1" + struct.pack("<IIQ", 1, 3, 7) + ENGINE
    + struct.pack("<6Q", 40, 5, 1 << 20, 4, 9 << 24 | 2, 2)
    + struct.pack("<4Q", 1, 2 << 24, 8, 5 << 24 | 1)
).ljust(4088, b"\0")  # fmt: skip


def test_an_entry_has_the_bytes_of_the_format_page():
    body = GOLDEN + struct.pack("<Q", xxhash.xxh3_64_intdigest(GOLDEN))
    assert ENTRY.encode() == body
    assert encode_register(ENTRY) == bytes(4096) + body, "an odd number lies behind an even one"
    assert decode_register(encode_register(ENTRY), "meta/log-03") == ENTRY
    report = verify_register("meta/log-03", encode_register(ENTRY))
    assert report.extra["newest"] == [(4, 9 << 24 | 2), (1, 2 << 24), (8, 5 << 24 | 1)]
    assert not report.is_damaged


def test_names():
    assert [register_name(shard) for shard in (0, 7, 123)] == ["log-00", "log-07", "log-123"]
    names = ("log-00", "log-123", "log-0", "log-007", "log-00.tmp")
    assert [parse_register_name(name) for name in names] == [0, 123, None, None, None]


def noted(times: int) -> SimulatedDisk:
    disk = SimulatedDisk("/data")
    register = LogRegister(disk, "/data", 0)
    for n in range(times):
        register.record_newest_file(ENGINE, 1 + n // 3, 1 << 24 | n, 1 << 20, (n, n))
    return disk


def test_the_newest_file_of_every_shard_count_is_kept():
    found = read_register(noted(8), "/data", 0)
    assert found is not None
    assert found.number == 8
    assert dict(found.newest_files) == {1: 1 << 24 | 2, 2: 1 << 24 | 5, 3: 1 << 24 | 7}
    again = LogRegister(noted(8), "/data", 0)
    again.record_newest_file(ENGINE, 1, 2 << 24, 1 << 20, (9, 9))


def test_a_flipped_bit_leaves_the_other_entry_and_both_readers_agree():
    disk = noted(4)
    data = disk.contents()["/data/meta/log-00"]
    sound = decode_register(data, "")
    for at in [*range(200), *range(4000, 4300), *range(8100, 8192)]:
        damaged = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        found = decode_register(damaged, "")
        assert found.number == (sound.number if at >= ENTRY_BYTES else sound.number - 1)
        report = verify_register("meta/log-00", damaged)
        assert [each.severity for each in report.findings] == ["remark"]
        assert report.header["number"] == found.number


@pytest.mark.parametrize("data", [b"", bytes(8192), b"\xff" * 8192, ENTRY.encode(), ENTRY.encode() * 3])
def test_bytes_without_a_valid_entry_are_refused(data):
    with pytest.raises(CorruptData):
        decode_register(data, "meta/log-03")
    assert verify_register("meta/log-03", data).is_damaged


def test_a_register_of_another_shard_or_version_is_refused():
    disk = noted(1)
    disk.rename("/data/meta/log-00", "/data/meta/log-01")
    with pytest.raises(CorruptData, match="must belong to shard 1, got shard 0"):
        read_register(disk, "/data", 1)
    body = bytearray(ENTRY.encode()[:-8])
    body[8] = 2
    newer = bytes(4096) + bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
    with pytest.raises(CorruptData, match="version"):
        decode_register(newer, "meta/log-03")
    assert verify_register("meta/log-03", newer).is_damaged


def test_ids_upper_bound_exceeds_the_ids_of_a_lost_file():
    ids, epochs = ids_upper_bound((100, 7), 88_000, 4)
    assert (ids, epochs) == (100 + 16 * 1001, 7 + 1001)


class CountingDisk(SimulatedDisk):
    opened = 0

    def open_for_overwrite(self, path: str) -> int:
        self.opened += 1
        return super().open_for_overwrite(path)


def test_a_register_opens_its_file_once_and_cannot_write_its_successors_file():
    """The next log file needs no new descriptor, and a replaced process does not write the current
    register."""
    disk = CountingDisk("/data")
    before, after = LogRegister(disk, "/data", 0), LogRegister(disk, "/data", 0)
    before.record_newest_file(ENGINE, 1, 1 << 24, 1 << 20, (0, 0))
    after.record_newest_file(ENGINE, 1, 2 << 24, 1 << 20, (0, 0))
    assert disk.opened == 2
    before.record_newest_file(ENGINE, 1, 1 << 24 | 1, 1 << 20, (0, 0))
    after.record_newest_file(ENGINE, 1, 2 << 24 | 1, 1 << 20, (0, 0))
    assert disk.opened == 2
    found = read_register(disk, "/data", 0)
    assert found is not None
    assert dict(found.newest_files) == {1: 2 << 24 | 1}
