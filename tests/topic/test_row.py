"""A topic as a row of a snapshot: no value is lost, and a small topic has a small row."""

from __future__ import annotations

import random

import msgspec
import pytest
from pyroaring import BitMap64

from ringlog.digests import digest_of_id, digest_of_key
from ringlog.errors import CorruptData
from ringlog.limits import DEDUP_RUNS_PER_TOPIC_MAX
from ringlog.topic.config import TopicConfig
from ringlog.topic.dedup import ProducerSeqRun
from ringlog.topic.idempotency import IdempotencyEntry
from ringlog.topic.row import decode_row, encode_row
from ringlog.topic.state import ShardTopic
from ringlog.types import SESSION_BIT

STAMP = 1_790_000_000_000_000
PRODUCERS_AT = 19
KEYS_AT = 20
"""Index of the row's field in which older engines stored plain idempotency keys."""


def plain(topic_id: int = 7, records: int = 1) -> ShardTopic:
    """Return a typical topic: one producer, a few records."""
    topic = ShardTopic(topic_id, 3, "sensors.room-17.temperature", TopicConfig())
    producer = topic.producers.admit(SESSION_BIT | 0x1234_5678_9ABC)
    assert producer is not None
    producer.extend(1, records, 1, 1)
    topic.next_seq = records + 1
    topic.staged_count, topic.staged_bytes, topic.last_ts = records, 64 * records, STAMP
    topic.publish()
    return topic


def facts(topic: ShardTopic) -> tuple[object, ...]:
    """Return all values of a topic except the positions of its records."""
    return (
        topic.topic_id, topic.epoch, topic.name, topic.config, topic.next_seq, topic.head_seq, topic.last_ts,
        topic.last_read_us, topic.cap_floor, topic.ttl_floor, topic.trim_floor, topic.delete_floor,
        topic.dead, topic.version, topic.due_us, topic.staged_count, topic.staged_bytes, topic.count,
        topic.bytes, topic.is_reserving, topic.reservation.reserved, topic.lost,
        [(each, past.to_numbers()) for each, past in topic.producers.items()],
        topic.keys.items(0, topic.config.idempotency_window_ms),
    )  # fmt: skip


def test_the_row_of_a_plain_topic_is_below_200_bytes_and_complete():
    """A snapshot with many topics must stay small."""
    topic = plain()
    topic.is_reserving = True
    topic.reservation.restore(257)
    row = encode_row(topic)
    assert len(row) < 200
    assert facts(decode_row(7, row)) == facts(topic)


def test_a_row_keeps_every_value_of_a_topic():
    """The values include floors, deleted seqs, lost ranges, producers and keys. Encoding again gives the same
    bytes."""
    config = TopicConfig.parse({"ttl_ms": 60_000, "cap_records": 9, "durability": "fsync", "priority": -3})
    topic = ShardTopic(1 << 40, 9, "a", config)
    topic.head_seq, topic.next_seq = 5_000, 5_001
    topic.cap_floor, topic.ttl_floor, topic.trim_floor, topic.delete_floor = 10, 20, 3, 40
    topic.dead = BitMap64([100, 101, 4_000])
    topic.version, topic.due_us, topic.last_read_us, topic.last_ts = 77 << 32, STAMP + 9, STAMP - 1, STAMP
    topic.staged_count = topic.count = 4_957
    topic.staged_bytes = topic.bytes = 123_456
    topic.lost = [(200, 210), (300, 300)]
    for producer_id in (5, 1 << 62, SESSION_BIT | 9):
        producer = topic.producers.admit(producer_id)
        assert producer is not None
        producer.extend(4, 3, 1, 2)
        producer.add_runs([ProducerSeqRun(10, 2, 50, 1), ProducerSeqRun(20, 1, 60, 7)])
    topic.keys.remember(
        digest_of_key("first"), IdempotencyEntry(1, 2, STAMP, STAMP), config.idempotency_window_ms
    )
    topic.keys.remember(
        digest_of_id("second"), IdempotencyEntry(3, 1, STAMP, STAMP + 1, 500), config.idempotency_window_ms
    )
    again = decode_row(1 << 40, encode_row(topic))
    assert facts(again) == facts(topic)
    assert again.producers.get(5).find(11) == (51, 1)
    assert encode_row(again) == encode_row(topic), "SN-8"


def test_a_row_omits_expired_keys():
    """A row contains only the keys of the current window."""
    topic = plain()
    topic.keys.remember(digest_of_key("old"), IdempotencyEntry(1, 1, 0, STAMP), 120_000)
    topic.keys.remember(digest_of_key("new"), IdempotencyEntry(1, 1, 0, STAMP + 100_000_000), 120_000)
    again = decode_row(7, encode_row(topic, STAMP + 121_000_000))
    assert [key for key, _ in again.keys.items(0, 120_000)] == [digest_of_key("new")]


def test_plain_keys_of_an_older_row_are_found():
    """Rows from before digests contain the keys themselves."""
    topic = plain()
    row = msgspec.msgpack.decode(encode_row(topic))
    row[KEYS_AT] = [["k", 4, 2, STAMP, STAMP]]
    again = decode_row(7, msgspec.msgpack.encode(row))
    assert again.keys.find(digest_of_key("k"), STAMP, 120_000) == IdempotencyEntry(4, 2, STAMP, STAMP)


@pytest.mark.slow
def test_long_histories_of_an_older_row_are_shortened():
    """Earlier versions stored a run for each frame of any number of producers."""
    row = msgspec.msgpack.decode(encode_row(plain()))
    runs = [number for n in range(1, 1_001) for number in (n, 1, 2 * n, 1)]
    row[PRODUCERS_AT] = [[SESSION_BIT | each, 1_000, 0, *runs] for each in range(1, 451)]
    again = decode_row(7, msgspec.msgpack.encode(row))
    assert sum(past.run_count for _, past in again.producers.items()) <= DEDUP_RUNS_PER_TOPIC_MAX
    for _, past in again.producers.items():  # noqa: PERF102  not a dict
        assert past.find(1_000) == (2_000, 1)
        assert all(past.is_settled(number) for number in range(1, 1_001))
        assert not past.is_settled(1_001)
    assert encode_row(decode_row(7, encode_row(again))) == encode_row(again)


def test_runs_without_seqs_survive_a_row():
    """The numbers between them stay unused."""
    topic = plain()
    past = topic.producers.admit(9)
    assert past is not None
    for number in (2, 3, 5, 6, 8):
        past.extend(number, 1, 10 * number, 1)
    assert past.forget_seqs(1) == 2
    again = decode_row(7, encode_row(topic)).producers.get(9)
    assert again is not None
    assert [n for n in range(1, 10) if again.is_settled(n)] == [2, 3, 5, 6, 8]
    assert [n for n in range(1, 10) if again.find(n)] == [8]


def test_a_row_keeps_the_head_of_ephemeral_records_and_reports_them_lost():
    """Seqs continue above the head of the checkpoint, and the lost records are announced."""
    topic = plain(records=10)
    again = decode_row(7, encode_row(topic, volatile=[(5, 4, 256), (11, 6, 384)]))
    assert (again.head_seq, again.count, again.bytes, again.earliest_seq) == (10, 0, 0, 11)
    assert again.lost == [(1, 10)]


def test_a_damaged_row_decodes_or_raises_corrupt_data_with_its_topic():
    """Of 1,000 damaged rows, each decodes or is refused."""
    topic = plain(records=300)
    topic.dead = BitMap64([5, 9])
    row, rng = encode_row(topic), random.Random(20)
    refused = []
    for _ in range(1_000):
        bad = bytearray(row)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            decode_row(7, bytes(bad[: rng.randrange(1, len(bad) + 1)]))
        except CorruptData as e:
            refused.append(e.detail["topic_id"])
    assert len(refused) > 500
    assert set(refused) == {7}


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 2),
        (4, -1),
        (10, 900),
        (18, [3]),
        (18, [5, 3]),
        (19, [[1]]),
        (19, [[1, 9, 0, 5, 1, 1, 1]]),
    ],
)
def test_a_row_that_no_version_can_have_written_is_refused(at, value):
    """A field has an impossible value, and the other fields are valid."""
    fields = msgspec.msgpack.decode(encode_row(plain()))
    fields[at] = value
    with pytest.raises(CorruptData):
        decode_row(7, msgspec.msgpack.encode(fields))


def test_fields_of_a_later_version_are_ignored_and_missing_ones_take_defaults():
    """A later version may append fields to a row."""
    topic = plain()
    fields = msgspec.msgpack.decode(encode_row(topic))
    assert facts(decode_row(7, msgspec.msgpack.encode([*fields, "more"]))) == facts(topic)
    short = decode_row(7, msgspec.msgpack.encode(fields[:8]))
    assert (short.head_seq, short.count, len(short.producers)) == (1, 1, 0)
