"""Consumer groups through the gateway: claims carry their records, and other leases are returned."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.access.keys import Principal, authorise
from ringlog.actors.gateway import events as ev
from ringlog.contract import Reply
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Forbidden
from ringlog.limits import CLAIM_SLICE_MS_MAX, READ_BYTES_MAX
from tests.support.gateway_jobs import Driver, numbers, only

INFO = m.TopicInfo("t", 7, 3, 1, 0, False, {"type": "log"})


def claimed(driver: Driver, message: Any, *runs: tuple[int, int, int, int]) -> tuple[Any, ev.ReadFiles]:
    """Make the gateway claim. Return the message to the shard and the first read of the leased records."""
    (asked,) = driver.feed(ev.ClientRequestReceived(b"c", "w-id", 1, message, None))
    (at_shard,) = driver.feed(ev.ShardAnswered(asked.ticket, INFO))
    effects = driver.feed(ev.ShardAnswered(at_shard.ticket, m.ClaimReply("t", 7, 3, 5_000, 4, list(runs))))
    located = m.Located("t", 7, 3, 1, 0, 100, 1, 1, 1, 1, False, extents=[])
    locate = only(effects, ev.AskShard)
    return at_shard.message, only(driver.feed(ev.ShardAnswered(locate.ticket, located)), ev.ReadFiles)


@pytest.mark.parametrize(
    "message",
    [
        m.Claim("t", "w", 9, wait_ms=30_000, call=3, group="g", min_idle_ms=5),
        m.Steal("t", "w", b"\5" + bytes(7), call=3, group="g"),
    ],
)
def test_a_claim_carries_its_records_and_returns_leases_that_do_not_fit_to_its_group(message):
    driver = Driver()
    asked, wanted = claimed(driver, message, (5, 4, 1, 100))
    assert (asked.group, asked.call) == ("g", 3)
    if isinstance(asked, m.Claim):
        assert (asked.wait_ms, asked.min_idle_ms) == (CLAIM_SLICE_MS_MAX, 5)
    back = only(driver.read(wanted, 6, data=bytes(READ_BYTES_MAX)), ev.AskShard)
    assert isinstance(back.message, m.Nack)
    assert (back.message.group, back.message.node) == ("g", "w")
    assert (numbers(back.message.seqs), numbers(back.message.tokens)) == ([7, 8], [102, 103])
    reply = only(driver.feed(ev.ShardAnswered(back.ticket, m.NackReply("t", 2, b"", 1, 1))), Reply)
    assert (reply.message.runs, reply.message.frames) == ([(5, 2, 1, 100)], 1)
    assert back.message.call == 0, "the rest of the claim must stay unchanged"


@pytest.mark.parametrize(
    "message",
    [m.Claim("t", "w", 9, call=3, group="g"), m.Steal("t", "w", b"\5" + bytes(7), call=3, group="g")],
)
def test_a_claim_without_readable_records_is_undone_under_its_call_number(message):
    """A retry of the call must not return leases that no member holds."""
    driver = Driver()
    _, wanted = claimed(driver, message, (5, 4, 1, 100))
    missing = ev.FramesRead(wanted.ticket, 0, 0, 0, 4, None, CorruptData("damaged", topic="t", seq=5))
    back = only(driver.feed(missing), ev.AskShard)
    assert (numbers(back.message.seqs), back.message.call) == ([5, 6, 7, 8], 3)


@pytest.mark.parametrize(
    ("message", "scope"),
    [
        (m.GroupOpen("t", "g", 1), "read"),
        (m.Claim("t", "w", group="g"), "read"),
        (m.Steal("t", "w", b"", group="g"), "read"),
        (m.Ack("t", "w", b"", group="g"), "read"),
        (m.Nack("t", "w", b"", group="g"), "read"),
        (m.Extend("t", "w", b"", group="g"), "read"),
        (m.GroupLeave("t", "g", "w"), "read"),
        (m.ListPending("t", group="g"), "read"),
        (m.LeaseStats("t", group="g"), "read"),
        (m.GroupList("t"), "read"),
        (m.GroupSeek("t", "g", 1), "read"),
        (m.GroupTakeOver("t", "g", "w"), "read"),
        (m.GroupCommit("t", "g", 1, 0, 1), "read"),
        (m.GroupDelete("t", "g"), "delete"),
    ],
)
def test_scopes_of_requests_about_groups(message, scope):
    """A key with `read` for a topic may also move the positions of the topic's groups."""
    authorise(Principal("p", frozenset({scope}), ("t",)), message)
    with pytest.raises(Forbidden):
        authorise(Principal("p", frozenset({"read", "write", "delete", "admin"} - {scope})), message)
    with pytest.raises(Forbidden):
        authorise(Principal("p", frozenset({scope}), ("other",)), message)
