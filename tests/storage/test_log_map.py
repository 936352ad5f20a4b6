"""LogMap: the readers of one process share where topics are in the log."""

import pytest

from ringlog.envelope.messages import Located
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame
from ringlog.frame.batch import scan
from ringlog.frame.routed_frame import CopyRow, routed_content_of, routed_frame
from ringlog.limits import KIB, MIB
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.log_map import GAP_BYTES_MAX, SECTION_BYTES, LogFileKey, LogMap, LogMapRange
from ringlog.storage.reader import Pause, TopicReader
from ringlog.storage.real_disk import RealDisk
from tests.support.log_file import LogFile, sealed_frame

FILE = LogFileKey("shard-00/wal/1.wal", 7)


def log_of(topics, size=100):
    """Return frames of these topics in order, and the start offset of each."""
    made = [frame(encode_records([b"x" * size]), topic_id=topic) for topic in topics]
    starts = [sum(map(len, made[:n])) for n in range(len(made) + 1)]
    return b"".join(map(bytes, made)), starts


def learned(topics, size=100, log_map=None, file=FILE, origin=4096):
    data, starts = log_of(topics, size)
    log_map = log_map or LogMap()
    log_map.add_scan(file, data, scan(data), 0, origin)
    return log_map, [origin + start for start in starts]


def test_find_returns_the_topics_next_frame():
    log_map, at = learned([1, 2, 3, 1, 2, 9, 1])
    assert log_map.find(FILE, 9, at[0], MIB) == LogMapRange(at[5], at[6] - at[5], is_known=True)
    assert log_map.find(FILE, 2, at[2], MIB) == LogMapRange(at[4], at[5] - at[4], is_known=True)


def test_close_frames_are_one_range_of_at_most_the_requested_size():
    log_map, at = learned([1, 2, 1, 2, 1])
    assert log_map.find(FILE, 1, at[0], MIB) == LogMapRange(at[0], at[5] - at[0], is_known=True)
    assert log_map.find(FILE, 1, at[0], at[3] - at[0]) == LogMapRange(at[0], at[3] - at[0], is_known=True)
    # at least one frame
    assert log_map.find(FILE, 1, at[0], 8) == LogMapRange(at[0], at[1] - at[0], is_known=True)


def test_distant_frames_are_two_ranges():
    log_map, at = learned([1, 2, 1], size=GAP_BYTES_MAX)
    assert log_map.find(FILE, 1, at[0], MIB) == LogMapRange(at[0], at[1] - at[0], is_known=True)


def test_find_of_a_topic_without_frames_returns_the_end_of_the_known_range():
    log_map, at = learned([1, 2, 3])
    found = log_map.find(FILE, 4, at[1], MIB)
    assert (found.offset, found.is_known) == (at[3], False)


def test_nothing_is_known_of_another_salt_or_outside_of_the_scanned_range():
    log_map, at = learned([1, 2, 3])
    assert not log_map.find(FILE._replace(salt=8), 1, at[0], MIB).is_known
    assert log_map.find(FILE, 2, 64, MIB) == LogMapRange(64, at[0] - 64, is_known=False)
    assert log_map.find(FILE, 2, at[3], MIB).offset == at[3]
    assert not log_map.find(FILE, 2, at[3], MIB).is_known


def test_adjacent_scans_are_merged_in_any_order():
    data, starts = log_of([n % 10 for n in range(1_000)])
    log_map, step = LogMap(), 7
    pieces = list(range(0, 1_000, step))
    for first in [*pieces[1::2], *pieces[0::2]]:
        stop = starts[min(first + step, 1_000)]
        log_map.add_scan(FILE, data, scan(data, starts[first], stop), starts[first], 0)
    for n in range(1_000):
        found = log_map.find(FILE, n % 10, starts[n], 8)
        assert found == LogMapRange(starts[n], starts[n + 1] - starts[n], is_known=True)
    one = LogMap()
    for first in pieces:
        stop = starts[min(first + step, 1_000)]
        one.add_scan(FILE, data, scan(data, starts[first], stop), starts[first], 0)
    assert one.bytes < 1_000 * 24 + 20 * SECTION_BYTES, "not a piece for each time it was told"


def test_overlapping_scans_are_stored_once():
    data, starts = log_of([1, 2, 3, 4, 5])
    log_map = LogMap()
    log_map.add_scan(FILE, data, scan(data, starts[2], starts[4]), starts[2], 0)
    before = log_map.bytes
    log_map.add_scan(FILE, data, scan(data, starts[2], starts[4]), starts[2], 0)
    assert log_map.bytes == before
    log_map.add_scan(FILE, data, scan(data), 0, 0)
    assert log_map.find(FILE, 1, 0, 8).offset == starts[0]
    assert log_map.find(FILE, 2, 0, 8).offset == starts[1]
    assert log_map.find(FILE, 4, 0, 8).offset == starts[3]
    assert log_map.find(FILE, 5, 0, 8) == LogMapRange(starts[4], 1 << 62, is_known=False)


def test_memory_is_bounded_and_the_least_used_file_is_evicted_first():
    bytes_max = 40 * 24 + 3 * SECTION_BYTES
    log_map = LogMap(bytes_max)
    files = [LogFileKey(f"{n}.wal", n) for n in range(10)]
    for file in files:
        learned([1] * 10, log_map=log_map, file=file)
        log_map.find(files[0], 1, 4096, MIB)
        assert log_map.bytes <= bytes_max
    known = [file for file in files if log_map.find(file, 1, 4096, MIB).is_known]
    assert known[0] == files[0]
    assert known[-1] == files[-1]
    assert len(known) < 10


def test_the_first_range_of_a_file_beyond_the_bound_is_evicted():
    log_map = LogMap(30 * 24 + 2 * SECTION_BYTES)
    data, starts = log_of([1] * 100)
    for first in (0, 40, 80):  # with gaps, so that the ranges are not merged
        log_map.add_scan(FILE, data, scan(data, starts[first], starts[first + 10]), starts[first], 0)
    assert not log_map.find(FILE, 1, starts[0], 8).is_known
    assert log_map.find(FILE, 1, starts[80], 8).is_known


def test_copies_of_a_router_are_found_by_their_topics():
    appended = frame(encode_records([b"copied"]), topic_id=1)
    rows = [CopyRow(topic, 5, 6, 1, 9, 1, 2) for topic in (30, 31)]
    data = bytes(routed_frame(routed_content_of(appended, scan(appended), 0, hops=1), rows))
    before, _ = log_of([1, 2])
    after, _ = log_of([2])
    log_map = LogMap()
    log_map.add_scan(FILE, before + data + after, scan(before + data + after), 0, 0)
    for topic in (30, 31):
        found = log_map.find(FILE, topic, 0, MIB)
        assert found == LogMapRange(len(before), len(data), is_known=True)
    assert log_map.find(FILE, 2, len(before), MIB).offset == len(before) + len(data)
    broken = bytearray(data)
    broken[frames.layout.HEADER_BYTES] = 0  # The frame now declares zero copies.
    spoilt = LogMap()
    spoilt.add_scan(FILE, before + broken + after, scan(before + broken + after), 0, 0)
    assert not spoilt.find(FILE, 30, 0, MIB).is_known


class CountingDisk(RealDisk):
    """A disk that counts the bytes read."""

    def __init__(self):
        super().__init__()
        self.bytes_read = 0

    def read_into(self, fd, buffer, offset):
        self.bytes_read += len(buffer)
        return super().read_into(fd, buffer, offset)


class Log:
    """One log file with `rounds` rounds of one frame for each of `topics` topics."""

    def __init__(self, root, topics, rounds, size=2_000):
        self.disk, self.root, self.log_map = CountingDisk(), str(root), LogMap()
        self.file = LogFile(self.disk, self.root, file_bytes=16 * MIB)
        self.topics, self.rounds = topics, rounds
        self.starts = [
            self.file.append(topic, n + 1, [b"%d" % topic * size])
            for n in range(rounds)
            for topic in range(1, topics + 1)
        ]
        self.mark = LogHighWatermark(self.file.file_id, self.file.stop)

    def reader(self, topic, *, log_map, mark=None):
        located = Located("t", topic, 1, 0, 0, self.rounds, 1, 1, 1, 1, False, [self.file.extent()])
        return TopicReader(
            located, 0, data_dir=self.root, shm_dir=self.root, disk=self.disk, log_map=log_map,
            read_watermark=lambda _volatile: mark or self.mark,
        )  # fmt: skip

    def read(self, topic, *, log_map, mark=None):
        reader, found = self.reader(topic, log_map=log_map, mark=mark), []
        while True:
            run = reader.next_run(self.rounds, 64 * KIB)
            if run is Pause.UNFINISHED:
                continue
            if not isinstance(run, FrameRun):
                reader.close()
                return found, run
            found += run.batch.words[:, frames.layout.W_BASE_SEQ].tolist()


def test_many_readers_of_one_log_scan_it_once(tmp_path):
    log = Log(tmp_path, topics=400, rounds=4)
    size = log.file.stop
    for topic in range(1, 401):
        assert log.read(topic, log_map=log.log_map) == ([1, 2, 3, 4], Pause.AT_MARK)
    shared = log.disk.bytes_read
    log.disk.bytes_read = 0
    for topic in range(1, 401, 100):
        assert log.read(topic, log_map=None)[0] == [1, 2, 3, 4]
    alone = log.disk.bytes_read
    log.file.close()
    assert alone > 3 * size
    # Each reader starts with one window and reads its four frames.
    assert shared < 2 * size + 400 * (2 * 64 * KIB + 5 * 4 * KIB)


def test_a_range_that_others_scanned_is_not_read_before_it_is_published(tmp_path):
    """A reader never uses the later mark of another reader."""
    log = Log(tmp_path, topics=200, rounds=3)
    assert log.read(200, log_map=log.log_map)[0] == [1, 2, 3]
    early = LogHighWatermark(log.file.file_id, log.starts[400])
    assert log.read(200, log_map=log.log_map, mark=early) == ([1, 2], Pause.AT_MARK)
    assert log.read(199, log_map=log.log_map, mark=early) == ([1, 2], Pause.AT_MARK)
    log.file.close()


def test_a_frame_with_a_damaged_topic_id_is_detected_through_the_map(tmp_path):
    log = Log(tmp_path, topics=200, rounds=3)
    log.file.damage(log.starts[200 + 99] + 8, flip=1 << 6)  # The second frame of topic 100.
    assert log.read(1, log_map=log.log_map)[0] == [1, 2, 3]
    reader = log.reader(100, log_map=log.log_map)
    found = []
    while isinstance(run := reader.next_run(3), FrameRun):
        found.append(run.last_seq)
    assert (found, run) == ([1], Pause.MOVED), "asked anew before damage is cried"
    reader.relocate(reader.records.located)
    with pytest.raises(CorruptData, match="missing"):
        reader.next_run(3)
    reader.close()
    log.file.close()


def test_damage_at_a_mapped_position_is_reported(tmp_path):
    log = Log(tmp_path, topics=200, rounds=3)
    assert log.read(1, log_map=log.log_map)[0] == [1, 2, 3]
    bad = log.starts[200 + 99]
    log.file.damage(bad + 100)
    reader = log.reader(100, log_map=log.log_map)
    assert reader.next_run(3).last_seq == 1
    with pytest.raises(CorruptData, match="body does not match its checksum") as e:
        reader.next_run(3)
    assert (e.value.detail["offset"], e.value.detail["seq"]) == (bad, 2)
    reader.close()
    log.file.close()


def test_find_never_returns_a_control_frame():
    control = sealed_frame({}, topic_id=5, base_seq=0, kind=2, control=b"\xc0")
    log_map = LogMap()
    log_map.add_scan(FILE, control, scan(control), 0, 0)
    assert not log_map.find(FILE, 5, 0, MIB).is_known
