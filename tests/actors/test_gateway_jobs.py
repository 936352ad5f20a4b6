"""Claims through the gateway: leases, the records of the jobs, and leases that are returned."""

from __future__ import annotations

import msgspec
import pytest

from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal, authorise
from ringlog.actors.gateway import events as ev
from ringlog.contract import Reply
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Forbidden, NotAQueue, Status
from ringlog.limits import CLAIM_SLICE_MS_MAX, READ_BYTES_MAX
from tests.support.gateway_jobs import Driver, only


def test_a_claim_carries_the_frames_of_its_jobs():
    driver = Driver()
    wanted = driver.claim((5, 3, 1, 100), (20, 1, 2, 103))
    assert (wanted.after, wanted.stop, wanted.limit) == (4, 100, 3)
    following = only(driver.read(wanted, 9), ev.ReadFiles)
    assert following.after == 19
    reply = only(driver.read(following, 30, data=b"other"), Reply)
    assert (reply.message.runs, reply.message.frames) == ([(5, 3, 1, 100), (20, 1, 2, 103)], 2)
    assert reply.attachment == b"frameother"


def test_frames_that_also_contain_the_next_jobs_are_read_once():
    driver = Driver()
    wanted = driver.claim((5, 1, 1, 100), (7, 2, 1, 101))
    reply = only(driver.read(wanted, 8), Reply)
    assert (len(reply.message.runs), reply.message.frames) == (2, 1)


def test_an_empty_claim_reads_nothing_and_a_long_wait_is_shortened():
    driver = Driver()
    reply = driver.claim(wait_ms=30_000)
    assert (reply.message.runs, reply.attachment) == ([], None)
    assert driver.asked.wait_ms == CLAIM_SLICE_MS_MAX


def test_jobs_that_do_not_fit_are_returned():
    driver = Driver()
    wanted = driver.claim((5, 4, 1, 100), (20, 2, 1, 104))
    full = bytes(READ_BYTES_MAX)
    seqs, tokens, after = driver.nacked(driver.read(wanted, 6, data=full))
    assert (seqs, tokens) == ([7, 8, 20, 21], [102, 103, 104, 105])
    assert driver.is_undone, "no worker received the jobs, so this is no delivery"
    assert only(after, Reply).message.runs == [(5, 2, 1, 100)]


@pytest.mark.parametrize("payloads", [(), (b"job",)], ids=["in files", "in the shard's memory"])
def test_jobs_of_a_claim_that_waited_while_its_key_was_revoked_are_returned(payloads):
    driver = Driver()
    (asked,) = driver.feed(ev.ClientRequestReceived(b"c", "w-id", 1, m.Claim("q", "w", 9, call=8), None))
    (claim,) = driver.feed(ev.ShardAnswered(asked.ticket, m.TopicInfo("q", 7, 3, 1, 0, False, {})))
    driver.feed(ev.KeysLoaded(KeyRing()))
    claimed = m.ClaimReply("q", 7, 3, 5_000, 4, [(5, 2, 1, 100)], payloads=list(payloads))
    seqs, tokens, after = driver.nacked(driver.feed(ev.ShardAnswered(claim.ticket, claimed)))
    assert (seqs, tokens, driver.is_undone) == ([5, 6], [100, 101], True)
    reply = only(after, Reply)
    assert (reply.message.status, reply.attachment) == (Status.UNAUTHORIZED, None)


def test_unreadable_jobs_are_returned_and_an_unreadable_first_job_is_an_error():
    """Damaged records are never skipped silently."""
    driver = Driver()
    wanted = driver.claim((5, 4, 1, 100))
    damaged = ev.FramesRead(wanted.ticket, 0, 0, 0, 4, None, CorruptData("damaged", topic="q", seq=5))
    seqs, _, after = driver.nacked(driver.feed(damaged))
    assert seqs == [5, 6, 7, 8]
    assert driver.taken_back == driver.asked.call != 0, "a repeated claim must find nothing of it"
    answer = only(after, Reply).message
    assert (answer.status, answer.detail["reason"]) == (Status.INTERNAL, "corrupt_segment")

    driver = Driver()
    wanted = driver.claim((5, 4, 1, 100))
    following = only(driver.read(wanted, 6), ev.ReadFiles)
    damaged = ev.FramesRead(following.ticket, 0, 0, 0, 6, None, CorruptData("damaged", topic="q", seq=7))
    seqs, _, after = driver.nacked(driver.feed(damaged))
    assert seqs == [7, 8]
    assert driver.taken_back == 0
    assert only(after, Reply).message.runs == [(5, 2, 1, 100)]


def test_a_refusal_of_the_shard_is_the_reply():
    driver = Driver()
    (asked,) = driver.feed(ev.ClientRequestReceived(b"c", "w-id", 1, m.Claim("q", "w"), None))
    info = m.TopicInfo("q", 7, 3, 1, 0, False, {})
    (claimed,) = driver.feed(ev.ShardAnswered(asked.ticket, info))
    effects = driver.feed(ev.ShardAnswered(claimed.ticket, None, NotAQueue("not a queue", topic="q")))
    assert only(effects, Reply).message.status == Status.NOT_A_QUEUE


@pytest.mark.parametrize(
    ("message", "scopes"),
    [
        (m.Claim("q", "w"), {"read", "write"}),
        (m.Ack("q", "w", b""), {"write"}),
        (m.Nack("q", "w", b""), {"write"}),
        (m.Extend("q", "w", b""), {"write"}),
        (m.Reject("q", "w", b""), {"write"}),
        (m.ListPending("q"), {"read"}),
        (m.LeaseStats("q"), {"read"}),
    ],
)
def test_scopes_of_requests_about_jobs(message, scopes):
    """Each listed scope is required, and the topic must be within the key's prefixes."""
    authorise(Principal("p", frozenset(scopes), ("q",)), message)
    for missing in scopes:
        with pytest.raises(Forbidden):
            authorise(Principal("p", frozenset({"read", "write", "delete", "admin"} - {missing})), message)
    with pytest.raises(Forbidden):
        authorise(Principal("p", frozenset(scopes), ("other",)), message)


@pytest.mark.parametrize("message", [m.ListExhausted(), m.ConfirmDeadLettered("q", 1, b"")])
def test_only_the_engine_moves_dead_letters(message):
    with pytest.raises(Forbidden):
        authorise(Principal("p", frozenset({"read", "write", "delete", "admin"})), message)


@pytest.mark.parametrize("brought", ["payloads", "frames"])
def test_jobs_from_the_shards_memory_are_forwarded(brought):
    driver = Driver()
    (asked,) = driver.feed(ev.ClientRequestReceived(b"c", "w-id", 1, m.Claim("q", "w", 9, call=8), None))
    info = m.TopicInfo("q", 7, 3, 1, 0, False, {"type": "queue"})
    (claimed,) = driver.feed(ev.ShardAnswered(asked.ticket, info))
    given = m.ClaimReply("q", 7, 3, 5_000, 4, [(3, 1, 1, 70)])
    if brought == "payloads":
        given = msgspec.structs.replace(given, payloads=[b"job"], stamps=bytes(8))
    else:
        given = msgspec.structs.replace(given, frames=1, data=b"the frame")
    reply = only(driver.feed(ev.ShardAnswered(claimed.ticket, given)), Reply)
    assert reply.message == msgspec.structs.replace(given, data=b"")
    assert reply.attachment == (b"the frame" if brought == "frames" else None)
