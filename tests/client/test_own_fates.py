"""Records that a producer collects into one frame: each has its own result."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import ringlog
import ringlog.aio
from ringlog.client import NewRecord
from ringlog.errors import InvalidRequest, RecordTooLarge, RinglogError, TopicFull
from ringlog.limits import RECORD_BYTES_DEFAULT
from tests.support.engines import engine_fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
LINGER_MS = 10_000
"""Longer than any test, so only `flush` and `close` send frames."""

running = engine_fixture("module", wal={"shards": 1})


@pytest.fixture
def log(running):
    with ringlog.connect(running.url) as client:
        yield client


def fates(tickets):
    """Return the seq of each record, or the error it failed with."""
    found = []
    for ticket in tickets:
        try:
            found.append(ticket.result(20).last_seq)
        except RinglogError as e:
            found.append(e)
    return found


def send_all(log, topic, records):
    """Send records in one frame; each is a payload or a NewRecord."""
    producer = log.producer(topic, linger_ms=LINGER_MS)
    tickets = [
        producer.send(record) if isinstance(record, bytes) else producer.send(record.data, meta=record.meta)
        for record in records
    ]
    with contextlib.suppress(RinglogError):
        producer.close()
    assert [ticket.error() for ticket in tickets] == [
        None if isinstance(fate, int) else fate for fate in fates(tickets)
    ]
    return fates(tickets)


def test_a_nearly_full_topic_accepts_the_records_that_fit(log):
    log.topics.create("full", discard="reject", cap_records=10, durability="fsync")
    found = send_all(log, "full", [b"%d" % n for n in range(25)])
    assert found[:10] == list(range(1, 11))
    assert all(type(error) is TopicFull for error in found[10:])
    assert [record.data for record in log.reader("full")] == [b"%d" % n for n in range(10)]


def test_a_record_above_the_record_limit_fails_alone(log):
    large = NewRecord(data=bytes(RECORD_BYTES_DEFAULT - 100), meta={"a": "z" * 400})
    found = send_all(log, "large", [b"before", large, b"after"])
    assert found[0] == 1
    assert found[2] == 2
    assert type(found[1]) is RecordTooLarge
    assert found[1].detail["max"] == RECORD_BYTES_DEFAULT


def test_a_record_above_its_topics_cap_fails_alone_and_its_detail_has_one_unit(log):
    log.topics.create("narrow", discard="reject", cap_bytes=100)
    found = send_all(log, "narrow", [b"x" * 40, b"y" * 101, b"z" * 40, b"w" * 40])
    assert found[0] == 1
    assert found[2] == 2
    assert (type(found[1]), found[1].detail["bytes"], found[1].detail["max"]) == (RecordTooLarge, 101, 100)
    assert type(found[3]) is TopicFull
    log.topics.create("few", discard="reject", cap_records=2)
    with pytest.raises(RecordTooLarge, match="cap_records") as caught:
        log.append_many("few", [b"1", b"2", b"3"])
    assert (caught.value.detail["records"], caught.value.detail["max"]) == (3, 2)
    assert "bytes" not in caught.value.detail


def test_append_many_is_never_split(log):
    log.topics.create("atomic", discard="reject", cap_records=10)
    log.append_many("atomic", [b"%d" % n for n in range(8)])
    with pytest.raises(TopicFull):
        log.append_many("atomic", [b"8", b"9", b"10"])
    assert log.topics.state("atomic").head_seq == 8


def test_records_of_a_split_frame_keep_their_fields_and_order(log):
    log.topics.create("fields", discard="reject", cap_records=4)
    producer = log.producer("fields", linger_ms=LINGER_MS)
    tickets = [
        producer.send(b"%d" % n, key=b"k%d" % n, tag=f"t{n}", headers={"h": b"%d" % n}, meta={"n": n})
        for n in range(6)
    ]
    with contextlib.suppress(RinglogError):
        producer.close()
    assert [type(fate) for fate in fates(tickets)] == [int] * 4 + [TopicFull] * 2
    for n, record in enumerate(log.reader("fields")):
        assert (record.data, record.key, record.tag, record.meta) == (
            b"%d" % n,
            b"k%d" % n,
            f"t{n}",
            {"n": n},
        )
        assert dict(record.headers) == {"h": b"%d" % n}


def test_asyncio_tickets_have_their_own_results(running):
    async def main() -> list[object]:
        async with ringlog.aio.connect(running.url) as log:
            await log.topics.create("aio", discard="reject", cap_records=3)
            producer = log.producer("aio", linger_ms=LINGER_MS)
            tickets = [await producer.send(b"%d" % n) for n in range(5)]
            with contextlib.suppress(RinglogError):
                await producer.close()
            return await asyncio.gather(*(ticket.result(20) for ticket in tickets), return_exceptions=True)

    found = asyncio.run(main())
    assert [each.last_seq for each in found[:3]] == [1, 2, 3]
    assert [type(each) for each in found[3:]] == [TopicFull, TopicFull]


def test_an_invalid_record_fails_at_its_send(log):
    with log.producer("kinds", linger_ms=LINGER_MS) as producer:
        first = producer.send(b"1")
        with pytest.raises((InvalidRequest, RinglogError)):
            producer.send(b"2", headers={"h" * 70_000: b""})
        last = producer.send(b"3")
        producer.flush(20)
        assert [first.result(20).last_seq, last.result(20).last_seq] == [1, 2]
