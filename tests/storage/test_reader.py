"""TopicReader over real files."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringlog.envelope.messages import Located
from ringlog.errors import CorruptData
from ringlog.frame import layout
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.log_map import LogMap
from ringlog.storage.reader import Pause, TopicReader
from ringlog.storage.real_disk import RealDisk
from tests.support.log_file import LogFile, sealed_frame


class World:
    """A data directory with WAL files, and the published mark of a shard."""

    def __init__(self, root, **options):
        self.disk = RealDisk()
        self.root = str(root)
        self.files = []
        self.mark = LogHighWatermark(0, 0)
        self.options = options

    def file(self, **facts):
        file = LogFile(self.disk, self.root, **facts)
        self.files.append(file)
        return file

    def publish(self, file):
        self.mark = LogHighWatermark(file.file_id, file.stop)

    def located(self, extents, *, topic_id=5, epoch=1, head=1000, earliest=1, lost=()):
        return Located(
            "t", topic_id, epoch, 0, 0, head, earliest, 1, 1, 1, False, list(extents), list(lost)
        )  # fmt: skip

    def reader(self, extents, cursor=0, **facts):
        return TopicReader(
            self.located(extents, **facts), cursor, data_dir=self.root, shm_dir=self.root,
            read_watermark=lambda _volatile: self.mark, disk=self.disk, **self.options,
        )  # fmt: skip

    def close(self):
        for file in self.files:
            file.close()


@pytest.fixture(params=["pread", "mapped"])
def world(request, tmp_path):
    made = World(tmp_path, is_mapped=request.param == "mapped")
    yield made
    made.close()


def spans(reader, head=1000, **more):
    """Return (first seq, last seq) of every frame until a pause, and the pause."""
    found = []
    while isinstance(run := reader.next_run(head, **more), FrameRun):
        for words in run.batch.words.tolist():
            base, count = words[layout.W_BASE_SEQ], words[layout.W_COUNT_EPOCH] & 0xFFFFFFFF
            found.append((base, base + count - 1))
        assert run.last_seq == found[-1][1]
    reader.close()
    return found, run


def test_frames_of_a_topic_are_read_in_order_among_other_topics(world):
    file = world.file()
    for seq in range(1, 10, 3):
        file.append(5, seq, [b"a", b"b", b"c"])
        file.append(6, seq, [b"not mine"])
    world.publish(file)
    assert spans(world.reader([file.extent()])) == ([(1, 3), (4, 6), (7, 9)], Pause.AT_MARK)


def test_reading_starts_with_the_frame_that_contains_the_next_record(world):
    file = world.file()
    for seq in range(1, 10, 3):
        file.append(5, seq, [b"a", b"b", b"c"])
    world.publish(file)
    assert spans(world.reader([file.extent()], cursor=3))[0] == [(4, 6), (7, 9)]
    assert spans(world.reader([file.extent()], cursor=4))[0] == [(4, 6), (7, 9)]
    assert spans(world.reader([file.extent()], cursor=9)) == ([], Pause.AT_MARK)


def test_nothing_above_the_mark_is_delivered(world):
    """Frames above the published mark become readable when the mark advances."""
    file = world.file()
    file.append(5, 1, [b"a"])
    world.publish(file)
    file.append(5, 2, [b"b"])
    reader = world.reader([file.extent()])
    assert spans(reader) == ([(1, 1)], Pause.AT_MARK)
    world.publish(file)
    assert spans(reader) == ([(2, 2)], Pause.AT_MARK)


def test_a_frame_above_the_head_is_delivered_when_the_head_covers_it(world):
    """A frame becomes visible as a whole, when the head covers all its records."""
    file = world.file()
    file.append(5, 1, [b"a"])
    file.append(5, 2, [b"b", b"c"])
    world.publish(file)
    reader = world.reader([file.extent()])
    assert spans(reader, head=2) == ([(1, 1)], Pause.BEYOND_HEAD)
    assert spans(reader, head=3) == ([(2, 3)], Pause.AT_MARK)


def test_a_frame_copied_forward_is_delivered_once(world):
    """A successor writes uncertain frames again into its own file."""
    old = world.file(salt=1)
    for seq in range(1, 7):
        old.append(5, seq, [b"%d" % seq])
    new = world.file(incarnation=2, salt=2)
    for seq in range(4, 9):
        new.append(5, seq, [b"%d" % seq])
    world.publish(new)
    found, pause = spans(world.reader([old.extent(old.stop), new.extent()]))
    assert (found, pause) == ([(n, n) for n in range(1, 9)], Pause.AT_MARK)


def test_the_open_end_of_a_closed_file_needs_a_new_location(world):
    old, new = world.file(), world.file(n=1)
    old.append(5, 1, [b"a"])
    world.publish(old)
    reader = world.reader([old.extent()])
    assert spans(reader) == ([(1, 1)], Pause.AT_MARK)
    old.append(5, 2, [b"b"])
    new.append(5, 3, [b"c"])
    world.publish(new)
    assert spans(reader) == ([], Pause.MOVED)
    reader.relocate(world.located([old.extent(old.stop), new.extent()]))
    assert spans(reader) == ([(2, 2), (3, 3)], Pause.AT_MARK)


def test_a_closed_extent_is_still_bounded_by_a_mark_inside_it(world):
    """The shard already writes the next file while the last commit batch of the old file waits for its
    sync."""
    old, new = world.file(), world.file(n=1)
    old.append(5, 1, [b"a"])
    world.publish(old)
    old.append(5, 2, [b"b"])
    reader = world.reader([old.extent(old.stop), new.extent()])
    assert spans(reader) == ([(1, 1)], Pause.AT_MARK)
    world.publish(old)
    assert spans(reader) == ([(2, 2)], Pause.AT_MARK)


def test_a_deleted_file_needs_a_new_location(world):
    """The file is removed while the reader uses it."""
    file = world.file()
    file.append(5, 1, [b"a"])
    world.publish(file)
    extent = file.extent(file.stop)
    world.disk.unlink(f"{world.root}/{file.path}")
    assert spans(world.reader([extent])) == ([], Pause.MOVED)


def test_frames_of_another_epoch_are_skipped(world):
    """A topic that was deleted and created again has another epoch."""
    file = world.file()
    file.append(5, 1, [b"old", b"old"], epoch=1)
    file.append(5, 1, [b"new"], epoch=2)
    world.publish(file)
    assert spans(world.reader([file.extent()], epoch=2))[0] == [(1, 1)]


def test_control_frames_are_checked_but_not_delivered(world):
    file = world.file()
    file.write(sealed_frame({}, topic_id=5, base_seq=0, salt=file.salt, kind=2, control=b"\xc0"))
    file.append(5, 1, [b"a"])
    world.publish(file)
    assert spans(world.reader([file.extent()]))[0] == [(1, 1)]


@pytest.mark.parametrize("where", ["payload", "base_seq", "seal", "body_xxh3", "length"])
def test_damage_is_reported_after_the_records_before_it(world, where):
    """The error contains topic, seq, file and offset. A second read raises it again."""
    file = world.file()
    file.append(5, 1, [b"good"])
    bad = file.append(5, 2, [b"bad"])
    file.append(5, 3, [b"good"])
    world.publish(file)
    at = {"payload": 88, "base_seq": 16, "seal": 72, "body_xxh3": 64, "length": 3}[where]
    file.damage(bad + at)
    reader = world.reader([file.extent()])
    run = reader.next_run(1000)
    assert (run.first_seq, run.last_seq) == (1, 1)
    for _ in range(2):
        with pytest.raises(CorruptData) as e:
            reader.next_run(1000)
        assert e.value.detail["topic"] == "t"
        assert e.value.detail["seq"] == 2
        assert e.value.detail["file"] == file.path
        assert e.value.detail["offset"] == bad
    reader.close()


def test_a_frame_under_another_files_salt_does_not_verify(world):
    """Correct bytes in the wrong file are refused."""
    file = world.file(salt=7)
    file.write(sealed_frame({0: [b"x"]}, topic_id=5, base_seq=1, salt=8))
    world.publish(file)
    reader = world.reader([file.extent()])
    with pytest.raises(CorruptData, match="header does not match its seal"):
        reader.next_run(1000)
    reader.close()


def test_a_frame_with_a_damaged_topic_id_is_reported_as_missing(world):
    """Without this check the loss stays unnoticed, because the frame appears to belong to another topic."""
    file = world.file()
    file.append(5, 1, [b"a"])
    bad = file.append(5, 2, [b"b"])
    file.append(5, 3, [b"c"])
    world.publish(file)
    file.damage(bad + 8, flip=8)
    reader = world.reader([file.extent()])
    assert spans(reader) == ([(1, 1)], Pause.MOVED)
    reader.relocate(world.located([file.extent()]))
    with pytest.raises(CorruptData, match="missing") as e:
        reader.next_run(1000)
    assert (e.value.detail["seq"], e.value.detail["found_seq"]) == (2, 3)
    reader.close()


def test_removed_and_lost_positions_are_no_damage(world):
    """Gaps below earliest_seq and in the list of lost ranges are expected."""
    file = world.file()
    file.append(5, 4, [b"d", b"e"])
    file.append(5, 300, [b"x"])
    world.publish(file)
    reader = world.reader([file.extent()], earliest=4, lost=[6, 257, 258, 299])
    assert spans(reader) == ([(4, 5), (300, 300)], Pause.AT_MARK)


def test_zeros_below_the_mark_are_damage(world):
    file = world.file()
    file.append(5, 1, [b"a"])
    world.mark = LogHighWatermark(file.file_id, file.stop + 64)
    reader = world.reader([file.extent()])
    assert reader.next_run(1000).last_seq == 1
    with pytest.raises(CorruptData, match="zeros"):
        reader.next_run(1000)
    reader.close()


def test_a_file_shorter_than_its_mark_is_damage(world):
    file = world.file(file_bytes=8192)
    file.append(5, 1, [b"a"])
    world.mark = LogHighWatermark(file.file_id, 1 << 20)
    reader = world.reader([file.extent(start=8192)])
    with pytest.raises(CorruptData, match="file ends"):
        reader.next_run(1000)
    reader.close()


def test_a_frame_larger_than_the_window_is_read_whole(world):
    file = world.file()
    file.append(5, 1, [b"x" * 100_000])
    file.append(5, 2, [b"y"])
    world.publish(file)
    assert spans(world.reader([file.extent()]), bytes_max=4096)[0] == [(1, 1), (2, 2)]


def test_a_long_range_of_other_topics_returns_unfinished(world):
    file = world.file()
    for seq in range(1, 3000):
        file.append(6, seq, [b"x" * 200])
    file.append(5, 1, [b"mine"])
    world.publish(file)
    reader = world.reader([file.extent()])
    pauses = 0
    while (run := reader.next_run(1000, bytes_max=4096)) is Pause.UNFINISHED:
        pauses += 1
    assert pauses > 0
    assert run.last_seq == 1
    reader.close()


def test_volatile_files_are_in_shared_memory_and_have_their_own_mark(tmp_path):
    """The path of such an extent begins with "@"."""
    disk = RealDisk()
    (tmp_path / "shm").mkdir()
    file = LogFile(disk, str(tmp_path / "shm"), prefix="@")
    file.append(5, 1, [b"a"])
    reader = TopicReader(
        Located("t", 5, 1, 0, 0, 1, 1, 1, 1, 1, False, [file.extent()]), 0,
        data_dir=str(tmp_path), shm_dir=str(tmp_path / "shm"), disk=disk,
        read_watermark=lambda volatile: LogHighWatermark(file.file_id,
        file.stop) if volatile else LogHighWatermark(0, 0),
    )  # fmt: skip
    assert spans(reader) == ([(1, 1)], Pause.AT_MARK)
    file.close()


def test_a_mapped_runs_bytes_outlive_the_reader(tmp_path):
    world = World(tmp_path, is_mapped=True)
    file = world.file()
    file.append(5, 1, [b"payload!"])
    world.publish(file)
    reader = world.reader([file.extent()])
    run = reader.next_run(1000)
    reader.close()
    world.close()
    world.disk.unlink(f"{world.root}/{file.path}")
    start = int(run.batch.offsets[0]) + layout.HEADER_BYTES + 8
    assert bytes(run.buffer[start : start + 8]) == b"payload!"


_WRITES = st.lists(
    st.tuples(st.integers(4, 6), st.integers(1, 5), st.integers(0, 300), st.booleans()), max_size=40
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    _WRITES, st.integers(0, 40), st.sampled_from([4096, 512, 1 << 20]), st.sampled_from([0, 600, 1 << 20]),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_reads_equal_a_list_for_any_files_and_windows(
    tmp_path_factory, writes, cursor, window, map_bytes, seed
):
    """Every record after the cursor is read once and in order.

    The history includes new files, copied frames and restarts. Other readers of the process may have scanned
    any part of the log.
    """
    rng = random.Random(seed)
    log_map = LogMap(map_bytes) if map_bytes else None
    world = World(tmp_path_factory.mktemp("w"), is_mapped=bool(seed & 1), log_map=log_map)
    heads, models, incarnation, n = {4: 0, 5: 0, 6: 0}, {4: [], 5: [], 6: []}, 1, 0
    file = world.file(salt=1, file_bytes=1 << 18)
    recent, extents = [], []
    for topic, count, size, roll in writes:
        if roll:
            extents.append(file.extent(file.stop))
            incarnation, n = (incarnation + 1, 0) if rng.random() < 0.5 else (incarnation, n + 1)
            file = world.file(incarnation=incarnation, n=n, salt=rng.randrange(1, 99), file_bytes=1 << 18)
            for copied in recent[-rng.randrange(3) :] if n == 0 else []:
                file.append(*copied)
        payloads = [rng.randbytes(size) for _ in range(count)]
        recent.append((topic, heads[topic] + 1, payloads))
        file.append(*recent[-1])
        models[topic] += enumerate(payloads, heads[topic] + 1)
        heads[topic] += count
    world.publish(file)
    for topic in rng.sample([4, 5, 6, 5], 4):
        head = heads[topic]
        reader = world.reader([*extents, file.extent()], cursor=cursor, head=head, topic_id=topic)
        found = []
        while isinstance(run := reader.next_run(head, window), FrameRun):
            for words, offset in zip(run.batch.words.tolist(), run.batch.offsets.tolist(), strict=True):
                found += enumerate(_payloads(run.buffer, offset, words), words[layout.W_BASE_SEQ])
        reader.close()
        assert run is Pause.AT_MARK
        model = models[topic]
        assert [item for item in found if item[0] > cursor] == [item for item in model if item[0] > cursor]
    world.close()
    assert log_map is None or log_map.bytes <= map_bytes


def _payloads(buffer, offset, words):
    count = words[layout.W_COUNT_EPOCH] & 0xFFFFFFFF
    body = bytes(buffer[offset + layout.HEADER_BYTES : offset + (words[0] & layout.LEN_MASK) + 4])
    ends = memoryview(body)[: (count + 1) * 4].cast("i").tolist()
    data = body[layout.padded((count + 1) * 4) :]
    return [data[a:b] for a, b in itertools.pairwise(ends)]
