"""Rules of the client library, one test each, against a real engine."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time

import pytest

import ringlog
from ringlog.client import ClientState, FlushReport, NewRecord, TopicRemoval
from ringlog.errors import (
    Backpressure,
    BatchTooLarge,
    InvalidRequest,
    NotConnected,
    RecordTooLarge,
    RequestTimeout,
    TopicIncompatible,
    TopicNotEmpty,
    TopicNotFound,
    UsageError,
)
from ringlog.testing.real_engine import wait_until
from ringlog.types import Durability
from tests.support.topic_contents import payloads

WAIT_S = 20.0


def test_connect_is_lazy_and_wait_requires_an_engine(tmp_path):
    """Without `wait`, the client sends nothing to the engine before its first call."""
    url = f"ringlog://{tmp_path}"
    with ringlog.connect(url) as lazy:
        assert lazy.state is ClientState.CONNECTING
    with pytest.raises(NotConnected, match="no engine answers"):
        ringlog.connect(url, wait=0.05)


def test_a_write_without_an_engine_reports_not_applied(tmp_path):
    """The client never sent the write, so the error's outcome is certain."""
    with ringlog.connect(f"ringlog://{tmp_path}", timeout_ms=50) as client:
        with pytest.raises(NotConnected) as raised:
            client.append("t", b"x")
        assert raised.value.outcome == "not_applied"


def test_a_ticket_resolves_without_another_call(client, ringlog_topic):
    """The test calls no flush and polls nothing. The callback alone reports the result."""
    resolved = threading.Event()
    producer = client.producer(ringlog_topic(), linger_ms=1)
    producer.send(b"alone").on_done(lambda ticket: resolved.set())
    assert resolved.wait(WAIT_S)


def test_each_record_of_a_frame_gets_its_own_seq(client, topic):
    with client.producer(topic, linger_ms=60_000) as producer:
        tickets = [producer.send(b"%d" % n) for n in range(100)]
        assert not any(ticket.done() for ticket in tickets)
        report = producer.flush()
    assert (report.acked, report.is_complete) == (100, True)
    assert [ticket.result().first_seq for ticket in tickets] == list(range(1, 101))
    assert payloads(client, topic) == [b"%d" % n for n in range(100)]


def test_send_each_returns_one_ticket_with_the_seqs_of_all_frames(client, topic):
    data = [b"%d" % n for n in range(20_000)]
    with client.producer(topic) as producer:
        result = producer.send_each(data).result(WAIT_S)
    assert result.seqs.tolist() == list(range(1, 20_001))
    assert (result.first_seq, result.last_seq, result.count) == (1, 20_000, 20_000)
    assert payloads(client, topic) == data


def test_all_send_methods_of_a_producer_keep_one_order(client, topic):
    with client.producer(topic, linger_ms=60_000) as producer:
        producer.send(b"1")
        producer.send_many([b"2", NewRecord(data=b"3", tag="t")])
        producer.send(b"4")
        producer.send_each([b"5", b"6"])
        producer.send(b"7")
    assert payloads(client, topic) == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]


def test_all_fields_of_a_record_come_back(client, topic):
    client.append(
        topic, b"x", key=b"k", tag="täg", node="n", meta={"a": 1}, headers={"h": b"v"}, event_ts=5, priority=2
    )
    client.append(topic, b"bare")
    full, bare = client.read(topic).records
    assert (full.key, full.tag, full.node, full.meta) == (b"k", "täg", "n", {"a": 1})
    assert (dict(full.headers), full.event_ts, full.priority) == ({"h": b"v"}, 5, 2)
    assert (bare.key, bare.tag, bare.event_ts, dict(bare.headers)) == (None, None, None, {})


def test_send_raises_at_once_on_a_full_buffer_with_on_full_raise(client, ringlog_topic):
    """The error is `Backpressure`, and it contains the buffer's limit."""
    producer = client.producer(ringlog_topic(), linger_ms=60_000, max_buffer_bytes=4_000, on_full="raise")
    producer.send(b"x" * 3_500)
    with pytest.raises(Backpressure) as raised:
        producer.send(b"x" * 1_000)
    assert raised.value.detail["max_buffer_bytes"] == 4_000
    assert producer.flush(WAIT_S).is_complete


def test_send_blocks_on_a_full_buffer_and_drops_nothing(client, topic):
    """Memory stays bounded, and every record arrives in order."""
    data = [b"%04d" % n + b"x" * 996 for n in range(1_000)]
    with client.producer(topic, max_buffer_bytes=20_000) as producer:
        most = 0
        for one in data:
            producer.send(one)
            most = max(most, producer.stats().pending_bytes)
        producer.flush(WAIT_S)
        assert producer.stats().waits > 0
    assert most <= 20_000
    assert payloads(client, topic) == data


def test_flush_and_close_end_while_another_thread_sends(client, topic):
    """A flush waits for the records that were sent before it. A closed producer accepts no more."""
    producer = client.producer(topic, linger_ms=0.1)
    sent, begun = [], threading.Event()

    def send() -> None:
        with contextlib.suppress(UsageError):  # The producer is closed.
            while True:
                producer.send(b"%d" % len(sent))
                sent.append(len(sent))
                if len(sent) == 1_000:
                    begun.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert begun.wait(WAIT_S)
    try:
        flushed = producer.flush(WAIT_S)
    finally:
        closed = producer.close(WAIT_S)
        thread.join(WAIT_S)
    assert flushed.is_complete
    assert flushed.acked >= 1_000
    assert closed.is_complete
    assert payloads(client, topic) == [b"%d" % n for n in sent]


def test_a_close_during_another_one_reports_what_is_not_settled(tmp_path):
    client = ringlog.connect(f"ringlog://{tmp_path}", timeout_ms=60_000)
    producer, closed = client.producer("t"), []
    producer.send(b"x")
    thread = threading.Thread(target=lambda: closed.append(producer.close()))
    thread.start()

    def is_closing():
        try:
            producer.resume()
        except UsageError:
            return True
        return False

    try:
        wait_until(is_closing, WAIT_S, "the thread to close the producer")
        for end in (producer.close, producer.flush, producer.close):
            assert end(timeout=0.05).unfinished == 1
        with pytest.raises(UsageError, match="closed"):
            producer.send(b"y")
        assert not closed
    finally:
        assert client.close(0).unsent == 1
        thread.join(WAIT_S)
    (report,) = closed
    assert (report.failed, report.unfinished) == (1, 0)
    assert producer.close() == FlushReport(0, 0, 0)


def test_leaving_a_producer_block_waits_for_records_that_a_close_did_not_settle(tmp_path):
    client = ringlog.connect(f"ringlog://{tmp_path}", timeout_ms=300)
    with pytest.raises(NotConnected), client.producer("t") as producer:  # noqa: PT012
        producer.send(b"x")
        assert producer.close(0).unfinished == 1
    client.close(0)


def test_close_reports_each_record_that_was_never_sent_once(tmp_path):
    """These payloads travel in several parts."""
    client = ringlog.connect(f"ringlog://{tmp_path}")
    client.producer("t").send_each([b"x"] * 20_000)
    report = client.close(0)
    assert (report.unsent, report.unknown) == (20_000, 0)


def test_send_raises_backpressure_after_the_timeout_without_an_engine(tmp_path):
    """`send` waits up to `timeout_ms` for space in the buffer."""
    client = ringlog.connect(f"ringlog://{tmp_path}", timeout_ms=300)
    producer = client.producer("t", linger_ms=60_000, max_buffer_bytes=2_000)
    ticket = producer.send(b"x" * 1_500)
    with pytest.raises(Backpressure):
        producer.send(b"x" * 1_500)
    # The ticket's own timeout ends at the same moment, so either error may come first.
    with pytest.raises(NotConnected):
        ticket.result(WAIT_S)
    client.close(0)


def test_reading_an_empty_topic_returns_an_empty_page(client, topic):
    """An empty topic is not an error."""
    client.topics.create(topic)
    assert len(client.read(topic)) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.append("t", b"x", colour="red"),
        lambda client: client.producer("t", linger=3),
        lambda client: client.producer("t").send(b"x", colour="red"),
        lambda client: client.append_many("t", [b"x"], key="k"),
        lambda client: ringlog.connect(None, retries=3),
    ],
    ids=["append", "producer", "send", "append_many", "connect"],
)
def test_an_unknown_option_is_a_type_error(client, call):
    """Python raises the error at the call, before the client sends anything."""
    with pytest.raises(TypeError):
        call(client)


def test_threads_can_share_a_client_and_a_producer(client, ringlog_topic):
    """Every record arrives exactly once."""
    topic, threads, each = ringlog_topic(), 6, 300
    failures = []
    with client.producer(topic) as producer:

        def work(who):
            try:
                for n in range(each):
                    data = b"%d:%d" % (who, n)
                    if n % 10 == 0:
                        client.append(topic, data)
                    else:
                        producer.send(data).result(WAIT_S) if n % 50 == 1 else producer.send(data)
            except Exception as e:  # noqa: BLE001  shown by the assertion below
                failures.append(e)

        workers = [threading.Thread(target=work, args=(who,)) for who in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WAIT_S)
    assert not failures
    found = payloads(client, topic)
    assert sorted(found) == sorted(b"%d:%d" % (who, n) for who in range(threads) for n in range(each))


def test_close_is_bounded_and_reports_undelivered_records(tmp_path):
    """The tickets of unsent records fail with the outcome `not_applied`."""
    client = ringlog.connect(f"ringlog://{tmp_path}", timeout_ms=60_000)
    ticket = client.producer("t").send_many([b"x"] * 7)
    began = time.monotonic()
    report = client.close(timeout=0.1)
    assert time.monotonic() - began < WAIT_S
    assert (report.unsent, report.unknown, report.is_clean) == (7, 0, False)
    with pytest.raises(UsageError, match="closed") as raised:
        ticket.result(0)
    assert raised.value.outcome == "not_applied"
    assert client.close().is_clean
    with pytest.raises(UsageError, match="closed"):
        client.append("t", b"x")


def test_leaving_a_producer_block_raises_the_first_error(client, topic):
    client.topics.create(topic, cap_records=1, discard="reject")
    with pytest.raises(ringlog.errors.TopicFull), client.producer(topic) as producer:  # noqa: PT012
        producer.send(b"fits").result(WAIT_S)
        producer.send(b"does not")


def test_import_and_connect_print_nothing_and_install_no_signal_handler(ringlog_engine):
    """The program also ends without `close`, and every record that it sent is in the topic."""
    program = (
        "import signal; before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]\n"
        "import ringlog, logging\n"
        f"c = ringlog.connect({ringlog_engine.url!r}, wait=10)\n"
        "c.append('quiet', b'x'); c.producer('quiet', linger_ms=60000).send(b'y')\n"
        "assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]\n"
        "assert isinstance(logging.getLogger('ringlog.client').handlers[0], logging.NullHandler)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, timeout=WAIT_S, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")
    with ringlog.connect(ringlog_engine.url) as client:
        assert payloads(client, "quiet")[-2:] == [b"x", b"y"]


def test_a_failing_callback_is_logged_and_affects_nothing_else(client, topic, caplog):
    """The client keeps working after an exception in a callback."""
    with caplog.at_level(logging.ERROR, "ringlog.client"):
        ticket = client.producer(topic).send(b"x")
        ticket.result(WAIT_S)
        ticket.on_done(lambda _: 1 / 0)
    assert "callback" in caplog.text
    assert client.append(topic, b"y").first_seq == 2


def test_health_and_events_report_the_state_of_the_connection(client, ringlog_topic):
    """A client that connected once reports one event, `connected`."""
    client.append(ringlog_topic(), b"x")
    health = client.health()
    assert (health.state, health.transport, health.pending_records) == (ClientState.READY, "ring", 0)
    assert health.last_heard_age_s is not None
    assert [event.kind for event in client.events()] == ["connected"]


# -- writing ------------------------------------------------------------------------------------------


def test_a_write_creates_a_missing_topic_unless_create_is_false(client, ringlog_topic):
    """With `create=False` the write fails with `TopicNotFound`."""
    with pytest.raises(TopicNotFound):
        client.append(ringlog_topic(), b"x", create=False)
    assert client.append(ringlog_topic(), b"x").first_seq == 1


def test_the_ack_names_the_durability_that_was_reached(client, topic):
    """A write can request a stronger class than its topic's, but never a weaker one."""
    client.topics.create(topic, durability="disk")
    assert client.append(topic, b"x").durability is Durability.DISK
    assert client.append(topic, b"x", durability="fsync").durability is Durability.FSYNC
    assert client.append(topic, b"x", durability="memory").durability is Durability.DISK


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_an_idempotency_key_makes_a_retry_harmless(ringlog_engine, ringlog_topic, transport):
    """The retry returns the seqs of the first write and appends nothing."""
    topic = ringlog_topic(transport)
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as client:
        first = client.append_many(topic, [b"a", b"b"], idempotency_key="k")
        again = client.append_many(topic, [b"other"], idempotency_key="k")
        other = client.append_many(topic, [b"c"], idempotency_key="k2")
        assert (first.first_seq, first.last_seq, first.deduped) == (1, 2, False)
        assert (again.first_seq, again.last_seq, again.deduped) == (1, 2, True)
        assert (other.first_seq, other.deduped) == (3, False)


def test_a_write_is_all_or_nothing(client, topic):
    """If one record or the batch violates a limit, no record is appended."""
    with pytest.raises(RecordTooLarge):
        client.append_many(topic, [b"ok", b"x" * ((1 << 20) + 1)])
    with pytest.raises(BatchTooLarge):
        client.append_many(topic, [b"x"] * 10_001)
    with pytest.raises(InvalidRequest):
        client.append_many(topic, [])
    assert client.append_many(topic, [b"x"] * 10_000).last_seq == 10_000


def test_a_bad_record_does_not_affect_the_other_records_of_its_frame(client, topic):
    """Only the `send` of the bad record raises an error."""
    with client.producer(topic, linger_ms=60_000) as producer:
        producer.send(b"good")
        with pytest.raises(InvalidRequest, match="tag must have at most"):
            producer.send(b"bad", tag="x" * 257)
        with pytest.raises(UsageError):
            producer.send("text")
        producer.send(b"good too", tag="x" * 256)
    assert payloads(client, topic) == [b"good", b"good too"]


def test_a_frame_too_large_for_the_ring_keeps_its_position(client, topic):
    """Frames above RING_FRAME_FRACTION of the ring go by socket, and no later frame overtakes them."""
    large = [bytes([n]) * (1 << 20) for n in range(12)]
    with client.producer(topic) as producer:
        tickets = [producer.send_many([b"before"]), producer.send_many(large), producer.send_many([b"after"])]
        tickets.append(producer.send_each([b"e1", b"e2"]))
    assert [ticket.result().first_seq for ticket in tickets] == [1, 2, 14, 15]
    found = payloads(client, topic)
    assert [len(data) for data in found] == [6, *[1 << 20] * 12, 5, 2, 2]
    assert found[1:13] == large


def test_a_named_producer_continues_after_its_last_appended_frame(ringlog_engine, topic):
    """`resume` returns the state that the engine keeps for the producer's name."""
    with ringlog.connect(ringlog_engine.url) as client, client.producer(topic, name="loader") as producer:
        assert producer.resume().producer_seq == 0
        producer.send_many([b"a", b"b"])
        producer.send_many([b"c"])
    with ringlog.connect(ringlog_engine.url) as client, client.producer(topic, name="loader") as producer:
        state = producer.resume()
        assert (state.producer_seq, state.first_seq, state.count) == (2, 3, 1)
        assert producer.send_many([b"d"]).result(WAIT_S).first_seq == 4


def test_a_producer_continues_after_its_topic_was_recreated(client, topic):
    """The producer needs no call for this. The seqs start again at 1."""
    with client.producer(topic) as producer:
        assert producer.send_many([b"old"]).result(WAIT_S).first_seq == 1
        assert client.topics.delete(topic)
        fresh = producer.send_many([b"new"]).result(WAIT_S)
    assert (fresh.first_seq, fresh.epoch > 1) == (1, True)
    assert payloads(client, topic) == [b"new"]


# -- topics -------------------------------------------------------------------------------------------


def test_topics_can_be_created_configured_and_deleted(client, topic):
    made = client.topics.create(topic, durability="fsync", ttl_ms=60_000)
    assert (made.created, made.config["durability"], made.config["ttl_ms"]) == (True, "fsync", 60_000)
    with pytest.raises(TopicIncompatible):
        client.topics.create(topic)
    again = client.topics.create(topic, exist_ok=True, ttl_ms=60_000)
    assert (again.created, again.config["ttl_ms"]) == (False, 60_000)
    changed = client.topics.configure(topic, ttl_ms=70_000)
    assert (changed.config["ttl_ms"], changed.config["durability"]) == (70_000, "fsync")
    client.append(topic, b"x")
    assert client.topics.state(topic).head_seq == 1
    with pytest.raises(TopicNotEmpty):
        client.topics.delete(topic, if_empty=True)
    assert client.topics.delete(topic) == TopicRemoval(topic, True)
    assert client.topics.delete(topic) == TopicRemoval(topic, False)
    with pytest.raises(TopicNotFound):
        client.topics.state(topic)


@pytest.mark.parametrize("name", ["../x", "", "a/b", "ü", "x" * 256])
def test_an_illegal_topic_name_is_refused(client, name):
    """The error is `InvalidRequest`."""
    with pytest.raises(InvalidRequest):
        client.append(name, b"x")


def test_topics_of_all_shards_are_listed_once_in_byte_order(client, ringlog_topic):
    """A listing merges the pages of all shards."""
    wanted = [ringlog_topic(f"l{n:02d}") for n in range(25)]
    for name in reversed(wanted):
        client.topics.create(name)
    found = [summary.topic for summary in client.topics.list(ringlog_topic("l"), page_size=4)]
    assert found == wanted


def test_result_can_be_called_again_after_a_timeout(tmp_path):
    client = ringlog.connect(f"ringlog://{tmp_path}", timeout_ms=60_000)
    ticket = client.producer("t").send(b"x")
    with pytest.raises(RequestTimeout, match="not settled yet"):
        ticket.result(0.01)
    assert not ticket.done()
    client.close(0)


@pytest.mark.slow
@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize("bad", [[1, 2], ["a", "b"], [b"a", 3], [memoryview(b"abcdefgh").cast("I"), b"xx"]])
def test_send_each_refuses_values_that_are_not_bytes(client, ringlog_topic, bad, records):
    """A refused call sends nothing, and the producer continues to work."""
    with client.producer(ringlog_topic()) as out:
        with pytest.raises(UsageError):
            out.send_each(bad, records_per_frame=records)
        assert out.send_each([b"a", b"bb", b"c"], records_per_frame=2).result(10).seqs.tolist() == [1, 2, 3]
