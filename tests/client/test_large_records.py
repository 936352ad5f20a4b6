"""Records and headers of the maximum size pass every interface, and one byte more is refused.

limits.max_record_bytes can be raised to 64 MiB; headers need no setting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import ringlog
from ringlog import aio
from ringlog.client import EARLIEST
from ringlog.client.write.fields import NewRecord
from ringlog.errors import InvalidRequest, RecordTooLarge
from ringlog.limits import HEADER_BYTES_MAX, HEADERS_BYTES_MAX, HEADERS_PER_RECORD_MAX, MIB, RECORD_BYTES_MAX
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TIMEOUT_MS = 60_000
"""A busy disk is slow for 64 MiB."""
BY = ["ring", "ipc"]
LARGEST = bytes(range(256)) * (RECORD_BYTES_MAX // 256)


@pytest.fixture(scope="module")
def roomy() -> Iterator[TestEngine]:
    """An engine whose record limit is the highest possible one."""
    limits = {"max_record_bytes": RECORD_BYTES_MAX}
    with engine(delivery={"schedulers": 1}, gateway={"enabled": True}, limits=limits) as running:
        yield running


@pytest.mark.parametrize("transport", BY)
def test_the_largest_record_can_be_written_read_and_watched(roomy: TestEngine, transport: str) -> None:
    topic = f"largest-{transport}"
    with ringlog.connect(roomy.url, wait=20, transport=transport, timeout_ms=TIMEOUT_MS) as log:
        log.append(topic, b"before")
        with log.producer(topic) as producer:
            sent = producer.send(LARGEST, key=b"k" * 4_096, headers={"h": b"v" * HEADER_BYTES_MAX})
            after = producer.send(b"after")
        assert (sent.result().first_seq, after.result().first_seq) == (2, 3)
        found = list(log.reader(topic))
        assert [len(record.data or b"") for record in found] == [6, RECORD_BYTES_MAX, 5]
        assert found[1].data == LARGEST
        assert (len(found[1].key or b""), found[1].headers["h"]) == (4_096, b"v" * HEADER_BYTES_MAX)
        with log.watch(topic, start=EARLIEST) as watch:
            watched = [record for page, _ in zip(watch, range(3), strict=False) for record in page.records]
        assert [len(record.data or b"") for record in watched] == [6, RECORD_BYTES_MAX, 5]


@pytest.mark.parametrize("transport", BY)
def test_the_largest_job_can_be_claimed_rejected_and_redriven(roomy: TestEngine, transport: str) -> None:
    with ringlog.connect(roomy.url, wait=20, transport=transport, timeout_ms=TIMEOUT_MS) as log:
        name = f"jobs-{transport}"
        log.topics.create(name, type="queue", max_deliveries=1, dead_letter=f"dead-{transport}")
        queue = log.queue(name)
        queue.put_many([LARGEST])
        queue.put(b"small")
        large, small = queue.claim(wait_ms=20_000), queue.claim(wait_ms=20_000)
        assert (large[0].data == LARGEST, small[0].data) == (True, b"small")
        small[0].ack()
        large[0].reject("too much")
        wait_until(lambda: queue.stats().dead_lettered == 1, 60, "the job to be moved")
        (letter,) = queue.dead_letters()
        assert letter.data == LARGEST
        assert queue.redrive().moved == 1
        (again,) = queue.claim(wait_ms=20_000)
        assert again.data == LARGEST
        again.ack()
        group = log.group(name + "-log", "g", mode="queue", start=EARLIEST)
        log.append(name + "-log", LARGEST)
        (given,) = group.claim(wait_ms=20_000)
        assert given.data == LARGEST
        given.ack()


def test_large_records_survive_a_compaction_and_a_restart(tmp_path) -> None:
    settings = {"limits.max_record_bytes": RECORD_BYTES_MAX, "wal.file_bytes": MIB}
    with engine(directory=tmp_path / "engine", **settings) as running:
        with ringlog.connect(running.url, wait=20, timeout_ms=TIMEOUT_MS) as log:
            log.topics.create("t", durability="fsync")
            log.append("t", LARGEST)
            log.append("t", b"small")
        running.restart()
        with ringlog.connect(running.url, wait=20, timeout_ms=TIMEOUT_MS) as log:
            log.append("t", LARGEST[:-1])
            assert [len(record.data or b"") for record in log.reader("t")] == [
                RECORD_BYTES_MAX, 5, RECORD_BYTES_MAX - 1,
            ]  # fmt: skip
            assert next(iter(log.reader("t"))).data == LARGEST


@pytest.mark.parametrize("transport", BY)
def test_a_record_one_byte_too_large_is_refused_alone(roomy: TestEngine, transport: str) -> None:
    topic = f"over-{transport}"
    with ringlog.connect(roomy.url, wait=20, transport=transport, timeout_ms=TIMEOUT_MS) as log:
        with pytest.raises(RecordTooLarge) as refused:
            log.append(topic, LARGEST + b"x")
        assert (refused.value.detail["bytes"], refused.value.detail["max"]) == (
            RECORD_BYTES_MAX + 1, RECORD_BYTES_MAX,
        )  # fmt: skip
        with pytest.raises(RecordTooLarge):
            log.append(topic, LARGEST, meta={"a": "b"})
        assert log.append(topic, b"x").first_seq == 1


@pytest.mark.parametrize("transport", BY)
def test_the_default_record_limit_is_one_mebibyte(
    ringlog_engine: TestEngine, ringlog_topic, transport: str
) -> None:
    topic = ringlog_topic(transport)
    with ringlog.connect(ringlog_engine.url, wait=20, transport=transport) as log:
        with log.producer(topic, linger_ms=60_000) as producer:
            tickets = [producer.send(data) for data in (b"a", bytes(MIB + 1), bytes(MIB), b"b")]
            producer.flush()
            assert [type(ticket.error()) for ticket in tickets] == [
                type(None), RecordTooLarge, type(None), type(None),
            ]  # fmt: skip
            assert tickets[1].error().detail["max"] == MIB
        with pytest.raises(RecordTooLarge):
            log.append(topic, bytes(3 * MIB))
        assert [len(record.data or b"") for record in log.reader(topic)] == [1, MIB, 1]


MANY = {f"{n:05d}": b"v%05d" % n for n in range(HEADERS_PER_RECORD_MAX)}
LONG = {chr(97 + n) * (HEADER_BYTES_MAX if n == 1 else 1): bytes([n]) * HEADER_BYTES_MAX for n in range(14)}


@pytest.mark.parametrize("transport", BY)
@pytest.mark.parametrize("headers", [MANY, LONG], ids=["many", "long"])
def test_headers_of_the_maximum_size_are_returned_unchanged(
    ringlog_engine: TestEngine, ringlog_topic, transport: str, headers: dict[str, bytes]
) -> None:
    topic = ringlog_topic(transport)
    with ringlog.connect(ringlog_engine.url, wait=20, transport=transport) as log:
        log.append(topic, b"x", headers=headers)
        small = NewRecord(data=b"y", headers={"a": b""})
        log.append_many(topic, [small, NewRecord(data=b"z", headers=headers), b"w"])
        assert [dict(record.headers) for record in log.reader(topic)] == [headers, {"a": b""}, headers, {}]
        with log.watch(topic, start=EARLIEST) as watch:
            assert dict(next(iter(watch)).records[0].headers) == headers
        log.topics.create(topic + "-jobs", type="queue", max_deliveries=1, dead_letter=topic + "-dead")
        queue = log.queue(topic + "-jobs")
        queue.put(b"job", headers=headers)
        (job,) = queue.claim(wait_ms=20_000)
        assert job.headers == headers
        job.reject("because")
        wait_until(lambda: queue.stats().dead_lettered == 1, 60, "the job to be moved")
        (letter,) = queue.dead_letters()
        assert headers.items() <= letter.headers.items()


def test_headers_one_past_a_limit_are_refused(ringlog_engine: TestEngine, topic) -> None:
    with ringlog.connect(ringlog_engine.url, wait=20) as log:
        for headers, most in (
            ({**MANY, "one more": b""}, HEADERS_PER_RECORD_MAX),
            ({"k" * (HEADER_BYTES_MAX + 1): b""}, HEADER_BYTES_MAX),
            ({"k": b"v" * (HEADER_BYTES_MAX + 1)}, HEADER_BYTES_MAX),
            ({f"{n:02d}": bytes(HEADER_BYTES_MAX) for n in range(17)}, HEADERS_BYTES_MAX),
        ):
            with pytest.raises(InvalidRequest) as refused:
                log.append(topic, b"x", headers=headers)
            assert refused.value.detail["max"] == most
        assert log.append(topic, b"x").first_seq == 1


def test_the_asyncio_client_accepts_the_largest_record(roomy: TestEngine) -> None:
    async def all_of_it() -> None:
        async with aio.connect(roomy.url, wait=20, timeout_ms=TIMEOUT_MS) as log:
            await log.append("aio", LARGEST, headers=MANY)
            async for record in log.reader("aio"):
                assert (record.data == LARGEST, dict(record.headers)) == (True, MANY)

    asyncio.run(all_of_it())
