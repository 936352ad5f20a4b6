"""Changed bytes at rest are detected or provably meaningless: never a wrong answer, never silent.

The checker damages a small log in every way of a list, recovers, and compares the result with the acked
records. Mutants at the end prove that the checker can fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from ringlog.actors.wal_shard.recovery import file_replay
from ringlog.errors import CorruptData, DiskError, RinglogError
from ringlog.frame import batch as frames
from ringlog.frame.layout import FrameType
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.storage.recovery import FileScan, WalTailState
from ringlog.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from tests.support.disk_files import create_file
from tests.support.shard_world import DATA, World
from tests.support.shard_worlds import restart, started

LOG = f"{DATA}/wal/shard-00/wal-1-0.log"
REGISTER = f"{DATA}/meta/log-00"
Files = dict[str, bytes]
Records = dict[str, list[tuple[int, bytes]]]


def small_log(*, marked: bool = True) -> tuple[Files, Records]:
    """Return the files of a killed shard with two topics and a few commit batches, and the records to find.

    With `marked` the shard was idle before the kill, so that a chain mark follows every acked record.
    """
    world = started()
    for name in ("a", "b"):
        world.put_topic(name, durability="fsync")
    for i in range(3):
        world.append("a", [b"first %d" % i, b"second %d" % i])
        world.append("b", [b"other %d" % i])
    if marked:
        world.tick(0.2)
    records = {name: world.records(name) for name in ("a", "b")}
    return files_of(world), records


def files_of(world: World) -> Files:
    disk, found = world.disk, {}
    logs = [f"{DATA}/wal/shard-00/{name}" for name in disk.list_dir(f"{DATA}/wal/shard-00")]
    for path in [*logs, REGISTER]:
        fd = disk.open_read(path)
        found[path] = disk.read_at(fd, disk.size(fd), 0)
        disk.close(fd)
    return found


def mounted(files: Files) -> SimulatedDisk:
    disk = SimulatedDisk(DATA, f"{DATA}/meta", f"{DATA}/wal", f"{DATA}/wal/shard-00")
    for path, data in files.items():
        create_file(disk, path, data)
    disk.sync_dir(f"{DATA}/wal/shard-00")
    disk.sync_dir(f"{DATA}/meta")
    return disk


def recovered(files: Files, **options: object) -> World:
    """Return a world that was started on these files after a reboot. Errors of recovery are raised."""
    world = World(mounted(files), incarnation=100, **options)  # type: ignore[arg-type]
    world.reboot()
    world.start()
    return world


def end_of(data: bytes) -> int:
    return len(data.rstrip(b"\0")) + 7 & ~7


def last_mark(data: bytes) -> int:
    """Return the offset of the last chain mark. Damage to it looks like a torn tail."""
    batch = frames.scan(data, WAL_HEADER_BYTES, end_of(data))
    return int(batch.offsets[frames.types_of(batch.words) == FrameType.GROUP_MARK][-1])


def check(damages: Iterator[tuple[str, Files]], records: Records) -> dict[str, int]:
    """Recover each damaged log. It must be refused with the name of a file, or contain all records. Return
    the count of each outcome."""
    outcomes = {"refused": 0, "harmless": 0}
    for what, files in damages:
        refused, world = None, None
        try:
            world = recovered(files)
        except CorruptData as e:
            refused = e
        if world is None:
            assert refused is not None
            assert {"file", "file_id"} & set(refused.detail), f"{what}: {refused} names no file"
            outcomes["refused"] += 1
            continue
        for name, expected in records.items():
            assert world.runs[0].core.directory.find(name), (
                f"{what}: topic {name} disappeared without an error"
            )
            assert world.records(name) == expected, f"{what}: topic {name} changed without an error"
        outcomes["harmless"] += 1
    return outcomes


def with_bytes(files: Files, offset: int, new: bytes, path: str = LOG) -> Files:
    data = files[path]
    return {**files, path: data[:offset] + new + data[offset + len(new) :]}


def flips(files: Files, every: int = 1) -> Iterator[tuple[str, Files]]:
    """Yield the log with one flipped bit for each byte. Padding and the empty end are sampled."""
    data = files[LOG]
    end = end_of(data)
    used = [*range(128), *range(128, WAL_HEADER_BYTES, 97), *range(4088, end, every)]
    for offset in [*used, *range(end, len(data), 9973)]:
        flipped = bytes([data[offset] ^ 1 << offset * 5 % 8])
        yield f"bit flipped at {offset} of {end}", with_bytes(files, offset, flipped)


def pages(files: Files, size: int = 512) -> Iterator[tuple[str, Files]]:
    """Yield the log with each page zeroed or replaced by another page (RF-73, RF-74)."""
    data = files[LOG]
    starts = range(0, last_mark(data) - size, size)
    for start in starts:
        yield f"zeroed at {start}", with_bytes(files, start, bytes(size))
        for other in starts:
            if other != start:
                yield f"{other} over {start}", with_bytes(files, start, data[other : other + size])


def group_copies(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield the log with each run of frames replaced by another one (RF-75). All seals verify."""
    data = files[LOG]
    batch = frames.scan(data, WAL_HEADER_BYTES, last_mark(data))
    offsets = [*batch.offsets.tolist(), batch.stop]
    spans = [
        (offsets[i], offsets[j]) for i, j in itertools.combinations(range(len(offsets)), 2) if j - i <= 3
    ]
    for (a, a_stop), (b, b_stop) in itertools.permutations(spans, 2):
        if a_stop - a == b_stop - b and data[a:a_stop] != data[b:b_stop]:
            yield f"frames of {a} again at {b}", with_bytes(files, b, data[a:a_stop])


# -- below the durable end --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_flipped_bit_anywhere_is_detected_or_harmless():
    """A chain mark follows every frame, so this includes the last acked frame (RF-70 to RF-72)."""
    files, records = small_log()
    outcomes = check(flips(files, every=1), records)
    assert outcomes["refused"] > 1_000
    assert outcomes["harmless"] > 5


def test_a_zeroed_doubled_or_swapped_page_is_detected():
    """The pages have 512 bytes (RF-73, RF-74)."""
    files, records = small_log()
    outcomes = check(pages(files), records)
    assert outcomes["refused"] > 20


def test_a_valid_frame_in_the_wrong_place_is_detected():
    """The seals verify, but the chain of marks does not (RF-75)."""
    files, records = small_log()
    outcomes = check(group_copies(files), records)
    assert outcomes["refused"] > 5
    assert outcomes["harmless"] == 0


def test_damage_to_the_last_acked_frame_is_detected_with_the_board_alone():
    """No chain mark follows the frame, but the durable mark on the board covers it (RF-72)."""
    world = started({"a": "fsync"})
    world.append("a", [b"acked"])
    files = files_of(world)
    last = end_of(files[LOG]) - 8
    disk = mounted(with_bytes(files, last, b"\xff"))
    for marks, expected in ((world.marks, CorruptData), ({}, None)):
        after = World(disk.copy(), incarnation=100, boot_incarnation=1, boot_id=world.boot_id)
        after.marks = {**after.marks, 0: marks.get(0) or type(world.marks[0])()}
        if expected:
            with pytest.raises(expected, match="damaged below its durable end") as refused:
                after.start_shard(0)
            assert refused.value.detail["file"] == "wal/shard-00/wal-1-0.log"
            assert refused.value.detail["offset"] < last
        else:
            assert after.start_shard(0).found.truncated_bytes > 0, "cut, but counted and logged"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_tail_torn_at_any_byte_of_the_last_commit_batch_is_cut_to_the_previous_one():
    """A frame of several records is recovered completely or not at all (RF-60)."""
    world = started({"a": "fsync"})
    world.append("a", [b"before"])
    start = end_of(files_of(world)[LOG])
    world.append("a", [b"x" * 40, b"y" * 40, b"z" * 40])
    files = files_of(world)
    data, end = files[LOG], end_of(files_of(world)[LOG])
    cuts = sorted({*range(start, end + 1, 8), *range(start, start + 90), *range(end - 90, end + 1)})
    assert len(cuts) > 150
    for cut in cuts:
        for tail in (bytes(len(data) - cut), b"", b"\xa5" * 64):
            torn = {**files, LOG: data[:cut] + tail}
            found = recovered(torn).records("a")
            expected = 4 if data[:cut].ljust(end, b"\0") == data[:end] and not tail.strip(b"\0\xa5") else 1
            if tail.startswith(b"\xa5") and cut < end:
                expected = 1
            assert len(found) == expected, f"cut at {cut} of {start}..{end}, then {tail[:4]!r}"


@pytest.mark.parametrize(
    "word",
    [
        b"\xff\xff\xff\xff",
        b"\x01\0\0\0",
        b"\x4b\0\0\0",
        b"\0\0\0\x7f",
        b"\0\0\0\0\1\0\0\0",
        b"\xfc\xff\xff\x03",
    ],
)
def test_a_tail_with_an_impossible_length_is_cut_without_allocating_it(word):
    """Recovery must not allocate memory for a length that it has not validated."""
    files, records = small_log()
    world = recovered(with_bytes(files, end_of(files[LOG]), word))
    assert world.records("a") == records["a"]
    assert world.append("a", [b"next"], producer=9) == 7


def test_stale_frames_of_another_file_after_the_end_are_never_replayed():
    """They are sealed with another salt (RF-69)."""
    files, records = small_log()
    other = started({"a": "fsync"}, _salt=50)
    for _ in range(9):
        other.append("a", [b"stale"])
    stale = files_of(other)[LOG]
    end = end_of(files[LOG])
    world = recovered(with_bytes(files, end, stale[WAL_HEADER_BYTES : end_of(stale)]))
    assert world.records("a") == records["a"]


# -- files ------------------------------------------------------------------------------------------------


def two_lives() -> tuple[Files, Records]:
    """Return the files and records of two incarnations, of which the first one rotated once."""
    world = started({"a": "fsync"})
    for i in range(4):
        world.append("a", [b"%d" % i * 40_000])
    restart(world)
    world.append("a", [b"last"])
    world.tick(0.2)
    return files_of(world), {"a": world.records("a")}


def used(files: Files) -> list[str]:
    return [path for path, data in files.items() if path != REGISTER and data.strip(b"\0")]


def test_a_missing_file_is_detected_from_the_next_one():
    """Each file but the last is removed once (RF-76)."""
    files, records = two_lives()
    named = used(files)
    assert len(named) >= 3

    def without() -> Iterator[tuple[str, Files]]:
        for path in named[:-1]:
            yield f"without {path}", {other: data for other, data in files.items() if other != path}

    outcomes = check(without(), records)
    assert outcomes["refused"] >= len(named) - 2, "all files but the one with copied frames must be missed"


def test_swapped_or_renamed_files_are_refused():
    """The name of a file is part of its header (RF-75, RF-76)."""
    files, _ = two_lives()
    first, second, *_ = used(files)
    with pytest.raises(CorruptData, match="does not match its name"):
        recovered({**files, first: files[second], second: files[first]})
    with pytest.raises(CorruptData, match="does not match its name"):
        recovered({**files, f"{DATA}/wal/shard-00/wal-50-0.log": files[first]})


def test_a_file_of_another_data_directory_is_refused():
    """This holds even with the right name and the right seals (RF-76)."""
    files, _ = small_log()
    world = World(mounted(files), incarnation=100)
    monkey = bytes(range(16, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.shard_world.ENGINE_ID", monkey)
        with pytest.raises(CorruptData, match="another data directory") as refused:
            world.start()
    assert refused.value.detail["file"].endswith("wal-1-0.log")


def test_a_file_restored_from_an_old_backup_is_refused():
    """Its frames verify, but more of them were durable when the next file was created (RF-76)."""
    world = started({"a": "fsync"})
    world.append("a", [b"old"])
    old = files_of(world)[LOG]
    world.append("a", [b"new"])
    world.tick(0.2)
    restart(world)
    files = files_of(world)
    with pytest.raises(CorruptData, match="damaged below its durable end"):
        recovered({**files, LOG: old})


def test_an_unknown_format_version_is_refused_and_nothing_is_written():
    """The error names the version (RF-81)."""
    import xxhash

    files, _ = small_log()
    header = bytearray(files[LOG][:WAL_HEADER_BYTES])
    header[8] = 9
    header[-8:] = xxhash.xxh3_64_intdigest(bytes(header[:-8])).to_bytes(8, "little")
    disk = mounted(with_bytes(files, 0, bytes(header)))
    before = disk.changes
    with pytest.raises(CorruptData, match="version"):
        World(disk, incarnation=100).start()
    assert disk.changes - before <= 2, "only the directories were synced"


@pytest.mark.parametrize(
    "newest",
    [
        b"",
        bytes(100),
        bytes(4_096),
        bytes(8_192),
        bytes(100_000),
        b"\xa5" * 4_096,
        b"\xa5" * 512 + bytes(90_000),
    ],
)
def test_a_newest_file_that_was_never_used_does_not_prevent_a_start(newest):
    """The file is empty, short, all zeros, has a torn header, or contains noise instead of zeros (RF-68)."""
    files, records = small_log()
    path = f"{DATA}/wal/shard-00/wal-1-1.log"
    world = recovered({**files, path: newest})
    assert world.records("a") == records["a"]
    assert not world.disk.exists(path), "the unused file must be removed"
    assert world.append("a", [b"next"], producer=9) == 7


def test_a_newest_file_with_only_a_header_is_accepted():
    """The incarnation died before its first commit batch (RF-68)."""
    files, records = two_lives()
    newest = used(files)[-1]
    alone = started(incarnation=7)
    header = files_of(alone)[f"{DATA}/wal/shard-00/wal-8-0.log"][:WAL_HEADER_BYTES]
    path = f"{DATA}/wal/shard-00/wal-8-0.log"
    world = recovered({**files, path: header + bytes(60_000)})
    assert world.records("a") == records["a"]
    assert newest != path


def test_a_destroyed_header_before_frames_is_damage_and_not_an_empty_file():
    """A zeroed first page must not make a file of acked frames look unused (RF-73)."""
    files, _ = small_log()
    with pytest.raises(CorruptData, match="no header"):
        recovered(with_bytes(files, 0, bytes(WAL_HEADER_BYTES)))


def test_a_read_error_is_an_error_and_never_the_end_of_the_log():
    """The error is injected at every read of a recovery (RF-51)."""
    files, records = small_log()
    clean = FaultyDisk(mounted(files))
    World(clean, incarnation=100).start()
    assert clean.calls["read"] > 5
    for nth in range(1, clean.calls["read"] + 1):
        disk = mounted(files)
        with pytest.raises(DiskError) as failed:
            World(FaultyDisk(disk, DiskFault("read", nth, "EIO")), incarnation=100).start()
        assert failed.value.detail["path"]
        world = started(disk=disk, incarnation=101)
        assert world.records("a") == records["a"], f"after read {nth} failed"


# -- wal.corruption = truncate -----------------------------------------------------------------------------


def test_truncate_cuts_at_damage_and_reports_the_loss_of_every_affected_topic():
    """This includes topics that have frames only after the damage."""
    files, records = small_log()
    data = files[LOG]
    batch = frames.scan(data, WAL_HEADER_BYTES, end_of(data))
    appends = batch.offsets[frames.types_of(batch.words) == 1].tolist()
    for number, at in enumerate(appends):
        damaged = with_bytes(files, at + 90, b"\xee")
        with pytest.raises(CorruptData):
            recovered(damaged)
        world = recovered(damaged, is_lenient=True)
        for name in ("a", "b"):
            kept = world.records(name)
            lost = world.topic(name).lost
            head = records[name][-1][0]
            assert kept == records[name][: len(kept)], "what is kept is a prefix"
            expected = [(len(kept) + 1, head)] if len(kept) < head else []
            assert lost == expected, f"frame {number}: {name} kept {len(kept)} of {head}"
            assert world.append(name, [b"after"], producer=9) == head + 1, "no number is issued twice"
        state = {name: (world.records(name), world.topic(name).lost) for name in ("a", "b")}
        world.kill()
        world.is_lenient = False
        world.start()
        assert {name: (world.records(name), world.topic(name).lost) for name in ("a", "b")} == state, (
            "the cut must be durable: a later strict start reports the same loss"
        )


def test_truncate_keeps_the_records_of_later_files():
    """Records in files after the damaged one stay readable, and the gap is reported."""
    files, records = two_lives()
    first = used(files)[0]
    batch = frames.scan(files[first], WAL_HEADER_BYTES, end_of(files[first]))
    at = int(batch.offsets[frames.types_of(batch.words) == 1][0])
    damaged = with_bytes(files, at + 100, b"\xee", first)
    with pytest.raises(CorruptData):
        recovered(damaged)
    world = recovered(damaged, is_lenient=True)
    lost = world.topic("a").lost
    assert lost
    assert lost[0][0] == 1
    kept = [pair for pair in records["a"] if pair[0] > lost[0][1]]
    assert world.records("a") == kept
    assert len(kept) >= 2
    world.kill()
    world.is_lenient = False
    world.start()
    assert world.records("a") == kept
    assert world.topic("a").lost == lost


def test_truncate_does_not_restore_a_topic_that_was_deleted_after_the_damage():
    """Creations and deletions after the damage still count."""
    from ringlog.envelope import messages as m

    world = started({"a": "fsync", "gone": "fsync"})
    world.append("gone", [b"x"])
    world.append("a", [b"damaged"])
    world.request(m.TopicDelete("gone"))
    world.put_topic("late", durability="fsync")
    world.append("late", [b"y"])
    world.tick(0.2)
    files = files_of(world)
    at = files[LOG].index(b"damaged")
    for start in range(2):
        world = recovered(with_bytes(files, at, b"D"), is_lenient=True)
        assert world.runs[0].core.directory.find("gone") is None, start
        assert world.topic("late").lost == [(1, 1)]
        assert world.append("late", [b"z"], producer=9) == 2


# -- mutants ----------------------------------------------------------------------------------------------


def is_caught(damages: Callable[[Files], Iterator[tuple[str, Files]]]) -> bool:
    files, records = small_log()
    try:
        check(damages(files), records)
    except (AssertionError, RinglogError):
        return True
    return False


def test_a_recovery_that_takes_damage_below_a_mark_for_a_torn_tail_is_caught(monkeypatch):
    """The mutant cuts the log at the first damaged frame in the middle."""
    judge = file_replay.classify_tail

    def lax(scan: FileScan, evidence: int) -> WalTailState:
        tail = judge(scan, evidence)
        return WalTailState.TORN if tail is WalTailState.CORRUPT else tail

    monkeypatch.setattr(file_replay, "classify_tail", lax)
    assert is_caught(lambda files: flips(files, every=40))


def test_a_scan_that_does_not_check_the_chain_is_caught(monkeypatch):
    """Frames in the wrong place verify. Only the chain and the seqs detect them."""

    def follow(self: FileScan, buffer: bytes, batch: object, row: int) -> bool:
        return True

    monkeypatch.setattr(FileScan, "_apply_mark", follow)
    assert is_caught(group_copies)


@pytest.mark.slow
def test_a_scan_that_does_not_check_seals_is_caught(monkeypatch):
    """The mutant accepts any frame header."""
    monkeypatch.setattr(frames, "first_bad_seal", lambda batch, seed: None)
    assert is_caught(flips)


def test_a_scan_that_does_not_check_bodies_is_caught(monkeypatch):
    """The mutant accepts any frame body (RF-71)."""
    monkeypatch.setattr(frames, "first_bad_body", lambda buffer, batch: None)
    assert is_caught(flips)


def test_a_recovery_that_takes_a_read_error_for_the_end_is_caught(monkeypatch):
    """The mutant returns no bytes if a read fails."""
    read_at = FaultyDisk.read_at

    def forgiving(self: FaultyDisk, fd: int, length: int, offset: int) -> bytes:
        try:
            return read_at(self, fd, length, offset)
        except DiskError:
            return b""

    monkeypatch.setattr(FaultyDisk, "read_at", forgiving)
    with pytest.raises((AssertionError, CorruptData, pytest.fail.Exception)):
        test_a_read_error_is_an_error_and_never_the_end_of_the_log()
