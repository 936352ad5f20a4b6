"""The gateway's decisions: events in, effects out."""

import numpy as np
import pytest

from actors.gateway import events as ev
from actors.gateway.append_validation import check_frames
from actors.gateway.auth import LOCAL_ID, KeyRing, Principal
from actors.gateway.core import GatewayCore, GatewayIdentity
from actors.gateway.permissions import SCOPES
from actors.gateway.replies import error_reply
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import (
    CorruptData,
    DiskError,
    RequestTimeout,
    StaleEpoch,
    Status,
    TopicNotFound,
)
from ringlog.frame import batch, layout
from ringlog.frame.settle_entry import WORDS, refused_entry
from ringlog.limits import GATEWAY_BYTES_PER_CONNECTION_MAX, GATEWAY_REQUESTS_PER_CONNECTION_MAX
from ringlog.placement import home_shard
from ringlog.testing.log_file import sealed_frame

ALICE, BOB = b"talice", b"tbob"
KEYS = KeyRing(
    [
        ("a-id", Principal("alice", frozenset({"read", "write"}), ("a.", "shared."))),
        ("b-id", Principal("bob", SCOPES)),
        ("d-id", Principal("dora", SCOPES, ("a.",))),
    ]
)
MS = 1_000_000


def frame(topic_id=7, count=1, size=10, kind=1):
    if kind != 1:
        return sealed_frame({}, topic_id=topic_id, base_seq=0, kind=kind, control=b"\xc0")
    return sealed_frame({0: [b"x" * size] * count}, topic_id=topic_id, base_seq=0, epoch=0)


class Driver:
    """A gateway with its clock, and short words for what one does to it."""

    def __init__(self, shards=2, ring_frame_bytes_max=4096, **bounds):
        self.core = GatewayCore(
            GatewayIdentity("e" * 32, "0", 1, shards, 9, ring_frame_bytes_max, **bounds), KEYS
        )
        self.shards = shards
        self.corr = 0

    def feed(self, *events):
        effects = self.core.handle(events)
        self.core.check()
        return effects

    def ask(self, message, attachment=None, client=BOB, user="b-id"):
        self.corr += 1
        return self.feed(ev.ClientRequestReceived(client, user, self.corr, message, attachment))

    def answer(self, effect, message=None, error=None):
        return self.feed(ev.ShardAnswered(effect.ticket, message, error))

    def know(self, topic, topic_id=7, shard=1):
        """Have the gateway resolve a topic."""
        (asked,) = self.ask(m.TopicResolve(topic))
        self.answer(asked, info(topic, topic_id, shard))


@pytest.fixture
def gateway():
    return Driver()


def info(topic, topic_id=7, shard=1, epoch=1):
    return m.TopicInfo(topic, topic_id, epoch, shard, 0, False, {})


def located(topic="t", head=5, epoch=1, **more):
    facts = {"earliest_seq": 1, "cap_floor": 1, "ttl_floor": 1, "trim_floor": 1, "recreated": False} | more
    return m.Located(
        topic=topic, topic_id=7, epoch=epoch, shard=1, slot=3, head_seq=head, extents=[], **facts
    )


def only(effects, kind):
    (effect,) = effects
    assert isinstance(effect, kind), effect
    return effect


def error_of(effects):
    reply = only(effects, Reply)
    assert isinstance(reply.message, m.ErrorReply)
    return Status(reply.message.status), reply.message.detail


# -- who may, and what is there -------------------------------------------------------------------------


def test_hello_and_ping_need_no_shard(gateway):
    welcome = only(gateway.ask(m.Hello(1, "x")), Reply).message
    assert (welcome.shard, welcome.shards, welcome.incarnation) == (-1, 2, 9)
    assert only(gateway.ask(m.Ping()), Reply).message.incarnation == 9
    assert error_of(gateway.ask(m.Hello(2, "x")))[0] is Status.INVALID_REQUEST


def test_bounds_that_were_lowered_are_said_and_hold():
    """L3, L7: limits.max_body_bytes and limits.max_limit."""
    gateway = Driver(body_bytes_max=1 << 20, read_limit=10)
    bounds = only(gateway.ask(m.Hello(1, "x")), Reply).message.limits
    assert (bounds["request_bytes"], bounds["read_limit"]) == (1 << 20, 10)
    gateway.know("t")
    large = frame(size=bounds["frame_bytes"])
    assert error_of(gateway.ask(m.Append("t", 1), large))[0] is Status.PAYLOAD_TOO_LARGE
    gateway.ask(m.Append("t", 1), frame(size=1 << 20))


def test_a_stranger_reaches_no_shard(gateway):
    """G1, SEC-4."""
    for user in ("", "c-id", "alice"):
        assert error_of(gateway.ask(m.TopicState("t"), user=user))[0] is Status.UNAUTHORIZED


def test_a_refusal_says_nothing_about_what_exists(gateway):
    """A-13, RF-106: the same words for a topic that is known and for one that is not."""
    gateway.know("secret")
    replies = [gateway.ask(m.TopicState(t), client=ALICE, user="a-id") for t in ("secret", "absent")]
    first, second = (error_of(effects) for effects in replies)
    assert (first[0], second[0]) == (Status.FORBIDDEN, Status.FORBIDDEN)
    assert set(first[1]) == set(second[1]) == {"topic"}


def test_a_key_taken_out_of_the_file_is_refused_at_the_next_request(gateway):
    """SEC-7, A-17."""
    gateway.feed(ev.KeysLoaded(KeyRing()))
    assert error_of(gateway.ask(m.TopicState("t")))[0] is Status.UNAUTHORIZED
    assert only(gateway.ask(m.TopicState("t"), user=LOCAL_ID), ev.AskShard)


def test_messages_of_the_engines_inside_are_refused(gateway):
    """SEC-5."""
    for inside in (m.RingOpen("c", 1, 0), m.EngineStop(), m.Drain(), m.RingDetach("r", True)):
        assert error_of(gateway.ask(inside))[0] is Status.FORBIDDEN


# -- forwarding -----------------------------------------------------------------------------------------


def test_a_name_is_resolved_at_home_and_the_request_goes_where_the_topic_is(gateway):
    asked = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    assert (asked.shard, asked.message) == (home_shard("t", 2), m.TopicResolve("t"))
    forwarded = only(gateway.answer(asked, info("t", shard=1)), ev.AskShard)
    assert (forwarded.shard, forwarded.message) == (1, m.TopicState("t"))
    again = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    assert again.message == m.TopicState("t")
    only(gateway.answer(forwarded, m.TopicDeleted("t", True)), Reply)


def test_a_topic_that_is_gone_is_forgotten(gateway):
    gateway.know("t")
    asked = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    assert error_of(gateway.answer(asked, error=TopicNotFound("no", topic="t")))[0] is Status.TOPIC_NOT_FOUND
    assert isinstance(only(gateway.ask(m.TopicState("t")), ev.AskShard).message, m.TopicResolve)


def test_deleting_what_is_not_there_is_no_error(gateway):
    """T-16."""
    asked = only(gateway.ask(m.TopicDelete("t")), ev.AskShard)
    reply = only(gateway.answer(asked, error=TopicNotFound("no", topic="t")), Reply)
    assert reply.message == m.TopicDeleted("t", False)


def test_a_key_hears_of_no_routers_but_those_that_it_reaches(gateway):
    """T-15, A-9."""
    gateway.know("a.t")
    asked = only(gateway.ask(m.TopicDelete("a.t"), user="d-id"), ev.AskShard)
    reply = only(gateway.answer(asked, m.TopicDeleted("a.t", True, ["a.r", "b.r"])), Reply)
    assert reply.message == m.TopicDeleted("a.t", True, ["a.r"])


def test_trouble_with_a_shard_is_told_without_our_insides(gateway):
    """ERR-5, W-18."""
    gateway.know("t")
    asked = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    reply = only(gateway.answer(asked, error=RequestTimeout("x", outcome="unknown", path="/secret")), Reply)
    assert (reply.message.status, reply.message.outcome) == (Status.NOT_READY, "unknown")
    assert "secret" not in str(reply.message)
    hidden = error_reply(DiskError("read failed", path="/secret", call="read"))
    assert "secret" not in str(hidden)
    corrupt = error_reply(CorruptData("bad", topic="t", seq=3, file="/secret", offset=9))
    assert (corrupt.detail["reason"], corrupt.detail["seq"]) == ("corrupt_segment", 3)
    assert "secret" not in str(corrupt)


def state(topic):
    return m.TopicStateReply(topic, 1, 1, 0, "log", 0, 1, 0, 0, 1, None, None, {})


def test_a_list_merges_the_shards_in_the_order_of_names(gateway):
    """T-11, T-12."""
    first = only(gateway.ask(m.TopicList("", "", 3)), ev.AskShard)
    second = only(gateway.answer(first, m.TopicListReply([state("a"), state("d")], False)), ev.AskShard)
    assert (first.shard, second.shard) == (0, 1)
    reply = only(gateway.answer(second, m.TopicListReply([state("b"), state("c")], False)), Reply)
    assert [t.topic for t in reply.message.topics] == ["a", "b", "c"]
    assert reply.message.more


def test_a_list_shows_only_what_the_key_may_see(gateway):
    """A-11, T-14: the shards are asked for the allowed prefixes only."""
    asked, prefixes = gateway.ask(m.TopicList(), client=ALICE, user="a-id"), []
    while isinstance(asked[0], ev.AskShard):
        prefixes.append(asked[0].message.prefix)
        asked = gateway.answer(asked[0], m.TopicListReply([], False))
    assert prefixes == ["a.", "a.", "shared.", "shared."]
    assert (
        only(gateway.ask(m.TopicList("a.b"), client=ALICE, user="a-id"), ev.AskShard).message.prefix == "a.b"
    )
    assert only(gateway.ask(m.TopicList("z"), client=ALICE, user="a-id"), Reply).message.topics == []


# -- appending ------------------------------------------------------------------------------------------


def entries(count):
    return np.zeros((count, WORDS), dtype=np.uint64).tobytes()


def test_frames_go_into_the_ring_as_they_came(gateway):
    """G3."""
    gateway.know("t")
    data = frame() + frame(count=3)
    push = only(gateway.ask(m.Append("t", 2), data), ev.PushFrames)
    assert (push.shard, push.data, push.offsets.tolist()) == (1, data, [0, len(frame()), len(data)])
    reply = only(gateway.feed(ev.FramesSettled(push.ticket, entries(2))), Reply)
    assert reply.message == m.Appended("t", 7, 1, False, entries(2))


@pytest.mark.parametrize(
    ("message", "data", "status"),
    [
        (m.Append("t", 1), None, Status.INVALID_REQUEST),
        (m.Append("t", 0), b"", Status.INVALID_REQUEST),
        (m.Append("t", 2), frame(), Status.INVALID_REQUEST),
        (m.Append("t", 1), frame() + frame(), Status.INVALID_REQUEST),
        (m.Append("t", -1), frame(), Status.INVALID_REQUEST),
        (m.Append("t", 1 << 40), frame(), Status.INVALID_REQUEST),
        (m.Append("t", 1), frame()[:-8], Status.CORRUPT_FRAME),
        (m.Append("t", 1), frame()[:-1], Status.CORRUPT_FRAME),
        (m.Append("t", 1), frame() + bytes(8), Status.CORRUPT_FRAME),
        (m.Append("t", 1), b"\xff" * 800, Status.CORRUPT_FRAME),
        (m.Append("t", 1), frame(kind=3), Status.INVALID_REQUEST),
        (m.Append("t", 2), frame(7) + frame(8), Status.INVALID_REQUEST),
        (m.Append("t", 2, idempotency_key="k"), frame() + frame(), Status.INVALID_REQUEST),
    ],
)
def test_what_is_not_a_run_of_appends_of_one_topic_is_refused(gateway, message, data, status):
    """G1, G3, RF-100: a topic's deletion is a frame as well."""
    gateway.know("t")
    assert error_of(gateway.ask(message, data))[0] is status


def test_frames_of_another_topic_are_refused_after_asking_again(gateway):
    """A-9: the name that was checked is the topic that is written."""
    gateway.know("t", topic_id=7)
    asked = only(gateway.ask(m.Append("t", 1), frame(topic_id=8)), ev.AskShard)
    assert isinstance(asked.message, m.TopicResolve)
    assert error_of(gateway.answer(asked, info("t", 7)))[0] is Status.STALE_EPOCH
    asked = only(gateway.ask(m.Append("t", 1), frame(topic_id=9)), ev.AskShard)
    assert only(gateway.answer(asked, info("t", 9)), ev.PushFrames)


def test_a_topic_that_got_another_life_is_looked_up_again(gateway):
    gateway.know("t")
    push = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    stale = np.array([refused_entry(0, Status.STALE_EPOCH, 7, 1)], dtype=np.uint64).tobytes()
    only(gateway.feed(ev.FramesSettled(push.ticket, stale)), Reply)
    assert isinstance(only(gateway.ask(m.Append("t", 1), frame()), ev.AskShard).message, m.TopicResolve)


def test_appends_that_wait_for_a_name_keep_their_order(gateway):
    """G2: a later producer number must not overtake an earlier one."""
    asked = only(gateway.ask(m.Append("t", 1), frame(size=1)), ev.AskShard)
    assert gateway.ask(m.Append("t", 1), frame(size=2)) == []
    assert gateway.ask(m.Append("t", 1), frame(size=3)) == []
    pushes = gateway.answer(asked, info("t"))
    assert [push.data for push in pushes] == [frame(size=n) for n in (1, 2, 3)]


def test_large_frames_go_by_socket_and_nothing_overtakes(gateway):
    """G2."""
    gateway.know("t")
    first = only(gateway.ask(m.Append("t", 1), frame(size=10)), ev.PushFrames)
    assert gateway.ask(m.Append("t", 1), frame(size=9000)) == []
    assert gateway.ask(m.Append("t", 1), frame(size=20)) == []
    other = only(gateway.ask(m.Append("t", 1), frame(size=30), client=ALICE, user=LOCAL_ID), ev.PushFrames)
    assert other.data == frame(size=30)
    settled, large = gateway.feed(ev.FramesSettled(first.ticket, entries(1)))
    if isinstance(settled, ev.AskShard):
        settled, large = large, settled
    assert isinstance(settled, Reply)
    assert (large.shard, large.attachment) == (1, frame(size=9000))
    answered = gateway.answer(large, m.Appended("t", 7, 1, False, entries(1)))
    assert {type(effect) for effect in answered} == {Reply, ev.PushFrames}


def test_a_failed_append_lets_the_next_one_go(gateway):
    gateway.know("t")
    first = only(gateway.ask(m.Append("t", 1, idempotency_key="k"), frame()), ev.AskShard)
    assert gateway.ask(m.Append("t", 1, idempotency_key="l"), frame()) == []
    effects = gateway.answer(first, error=RequestTimeout("late", outcome="unknown"))
    assert {type(effect) for effect in effects} == {Reply, ev.AskShard}


def test_creating_happens_where_the_name_is_at_home(gateway):
    """W-5, W-7."""
    asked = only(gateway.ask(m.Append("new", 1, create=True), frame(topic_id=0)), ev.AskShard)
    assert isinstance(asked.message, m.TopicResolve), "it may exist, and not at home (SH-4)"
    asked = only(gateway.answer(asked, error=TopicNotFound("no", topic="new")), ev.AskShard)
    assert (asked.shard, asked.attachment) == (home_shard("new", 2), frame(topic_id=0))
    reply = only(gateway.answer(asked, m.Appended("new", 3, 1, True, entries(1))), Reply)
    assert reply.message.created


def test_a_name_whose_home_points_elsewhere_is_followed(gateway):
    """SH-4: after a change of the shard count."""
    asked = only(gateway.ask(m.Append("t", 1, create=True), frame(topic_id=0)), ev.AskShard)
    pointer = m.TopicInfo("t", 0, 0, 1 - asked.shard, -1, False, {})
    again = only(gateway.answer(asked, pointer), ev.AskShard)
    assert (again.shard, again.message) == (1 - asked.shard, m.TopicResolve("t"))
    found = m.TopicInfo("t", 7, 1, 1 - asked.shard, 0, False, {"durability": "disk"})
    append = only(gateway.answer(again, found), ev.AskShard)
    assert (append.shard, append.message) == (1 - asked.shard, m.Append("t", 1, create=True))


@pytest.mark.parametrize("message", [m.TopicResolve("t"), m.TopicState("t")])
def test_shards_that_point_to_one_another_are_each_asked_once(gateway, message):
    """SH-4: nobody is sent round for ever, and no name without a topic is taken for one."""
    asked = only(gateway.ask(message), ev.AskShard)
    back = m.TopicInfo("t", 0, 0, asked.shard, -1, False, {})
    again = only(gateway.answer(asked, m.TopicInfo("t", 0, 0, 1 - asked.shard, -1, False, {})), ev.AskShard)
    status, detail = error_of(gateway.answer(again, back))
    assert (status, detail) == (Status.NOT_READY, {"topic": "t"})
    assert only(gateway.ask(message), ev.AskShard).shard == asked.shard, "nothing was remembered"


def test_an_inline_config_needs_admin_only_to_create(gateway):
    """W-6."""
    message = m.Append("a.new", 1, create=True, config={"durability": "fsync"})
    asked = only(gateway.ask(message, frame(topic_id=0), client=ALICE, user="a-id"), ev.AskShard)
    assert isinstance(asked.message, m.TopicResolve)
    status, detail = error_of(gateway.answer(asked, error=TopicNotFound("no", topic="a.new")))
    assert (status, detail) == (Status.FORBIDDEN, {"required_scope": "admin"})
    asked = only(gateway.ask(message, frame(topic_id=0), client=ALICE, user="a-id"), ev.AskShard)
    there = only(gateway.answer(asked, info("a.new")), ev.AskShard)
    assert (there.shard, there.message) == (1, message)


def test_what_is_in_flight_is_bounded_for_each_connection(gateway):
    """G5, SEC-17: Throttled, and room again after an answer."""
    gateway.know("t")
    pushes = [only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames) for _ in range(1024)]
    assert len(pushes) == GATEWAY_REQUESTS_PER_CONNECTION_MAX
    status, detail = error_of(gateway.ask(m.Append("t", 1), frame()))
    assert (status, detail["limit"]) == (Status.THROTTLED, "requests_per_connection")
    assert detail["retry_after_ms"] > 0
    assert only(gateway.ask(m.Append("t", 1), frame(), client=b"tother"), ev.PushFrames)
    gateway.feed(ev.FramesSettled(pushes[0].ticket, entries(1)))
    assert only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)


def test_bytes_in_flight_are_bounded_for_each_connection(gateway, monkeypatch):
    """G5."""
    assert GATEWAY_BYTES_PER_CONNECTION_MAX > 2 * 64 * (1 << 20)
    monkeypatch.setattr("actors.gateway.core.GATEWAY_BYTES_PER_CONNECTION_MAX", 2 * len(frame()))
    gateway.know("t")
    first = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    assert error_of(gateway.ask(m.Append("t", 1), frame()))[1]["limit"] == "bytes_per_connection"
    gateway.feed(ev.FramesSettled(first.ticket, entries(1)))
    only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)


# -- reading --------------------------------------------------------------------------------------------


def read_as_far_as_files(gateway, message, facts):
    asked = only(gateway.ask(message), ev.AskShard)
    assert asked.message == m.Locate(message.topic, message.after, message.epoch)
    return only(gateway.answer(asked, facts), ev.ReadFiles)


def test_a_read_locates_reads_and_answers(gateway):
    gateway.know("t")
    read = read_as_far_as_files(gateway, m.Read("t", 2), located())
    assert (read.after, read.stop, read.limit, read.max_bytes) == (2, 5, 256, 1 << 20)
    reply = only(gateway.feed(ev.FramesRead(read.ticket, 1, 3, 5, 5, b"frames")), Reply)
    assert reply.attachment == b"frames"
    assert reply.message == m.ReadReply("t", 7, 1, 2, 5, 5, 1, True, 1)


def test_a_tombstone_and_the_end_before_a_lost_range_are_told(gateway):
    """TB-2..TB-12."""
    gateway.know("t")
    facts = located(head=300, earliest_seq=4, cap_floor=4, lost=[34, 257])
    read = read_as_far_as_files(gateway, m.Read("t", 0), facts)
    assert (read.after, read.stop) == (3, 33)
    reply = only(gateway.feed(ev.FramesRead(read.ticket, 1, 30, 33, 33, b"f")), Reply).message
    assert (reply.gap_from, reply.gap_to, reply.reason) == (1, 3, "cap")
    assert (reply.next_after, reply.caught_up) == (33, False)


def test_a_waiting_read_holds_nothing_and_walks_once_more(gateway):
    """DR-18, DR-22."""
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=1000), located())
    watch = only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)
    assert (watch.slot, watch.topic_id, watch.epoch, watch.head_seq) == (3, 7, 1, 5)
    assert gateway.core.next_deadline_ns() == 1000 * MS
    asked = only(gateway.feed(ev.TopicHeadChanged(watch.ticket)), ev.AskShard)
    read = only(gateway.answer(asked, located(head=6)), ev.ReadFiles)
    assert only(gateway.feed(ev.FramesRead(read.ticket, 1, 1, 6, 6, b"f")), Reply).message.next_after == 6
    assert gateway.core.next_deadline_ns() is None
    assert gateway.core.requests_held == 0


def test_a_waiting_read_ends_with_its_time(gateway):
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=1000), located())
    watch = only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)
    assert gateway.feed(Tick(0, 999 * MS)) == []
    unwatch, reply = gateway.feed(Tick(0, 1000 * MS))
    assert unwatch == ev.UnwatchTopic(watch.ticket)
    assert (reply.message.caught_up, reply.message.frames) == (True, 0)
    assert gateway.feed(ev.TopicHeadChanged(watch.ticket)) == []


def test_waiting_is_clamped_to_half_a_minute(gateway):
    """N-7."""
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=10**9), located())
    gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5))
    assert gateway.core.next_deadline_ns() == 30_000 * MS


@pytest.mark.parametrize("wrong", [{"after": -1}, {"epoch": -1}, {"limit": -1}, {"max_bytes": -5}])
def test_negative_numbers_are_refused(gateway, wrong):
    """SEC-13: a negative seq decodes happily."""
    assert error_of(gateway.ask(m.Read(**({"topic": "t", "after": 0} | wrong))))[0] is Status.INVALID_REQUEST


def test_damage_is_an_error_that_names_the_records(gateway):
    """DR-16."""
    gateway.know("t")
    read = read_as_far_as_files(gateway, m.Read("t", 2), located())
    error = CorruptData("damaged", topic="t", seq=3, file="wal", offset=1)
    status, detail = error_of(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 2, None, error)))
    assert status is Status.INTERNAL
    assert detail == {"topic": "t", "seq": 3, "reason": "corrupt_segment"}


# -- clients and the engine come to an end --------------------------------------------------------------


def test_a_client_that_is_gone_is_forgotten(gateway):
    """SEC-19: its waiting reads at once, the rest when the shard has answered, without a reply."""
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=1000), located())
    watch = only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)
    push = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    assert gateway.feed(ev.ClientDisconnected(BOB)) == [ev.UnwatchTopic(watch.ticket)]
    assert gateway.core.requests_held == 1
    assert gateway.feed(ev.FramesSettled(push.ticket, entries(1))) == []
    assert gateway.core.requests_held == 0


def test_draining_answers_what_waits_refuses_what_comes_and_stops_when_all_is_answered(gateway):
    """DR-21, SD rules."""
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    push = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=1000), located())
    watch = only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)
    unwatch, reply = gateway.feed(DrainRequested())
    assert (unwatch.ticket, reply.message.frames) == (watch.ticket, 0)
    assert error_of(gateway.ask(m.TopicState("t")))[0] is Status.SHUTTING_DOWN
    answer, stop = gateway.feed(ev.FramesSettled(push.ticket, entries(1)))
    assert isinstance(answer, Reply)
    assert (type(stop), stop.code) == (Stop, 0)
    assert gateway.feed(Tick(0, 1)) == []


def test_draining_does_not_wait_for_schedulers_which_stop_as_well(gateway):
    """SD-1: neither for who has been asked to follow something, nor for who would be."""
    gateway.know("t")
    wanted = m.Subscribe(1, [m.Feed(1, "t", 7, 1, 0, 0)], 4)
    follow = only(gateway.ask(wanted), ev.SubscribeFeeds)
    listing = only(gateway.ask(m.RouterList()), ev.AskShard)
    late = only(gateway.ask(m.Subscribe(2, [m.Feed(1, "late", 8, 1, 0, 0)], 4)), ev.AskShard)
    for refused in gateway.feed(DrainRequested()):
        assert error_of([refused])[0] is Status.SHUTTING_DOWN
    assert gateway.core.requests_held == 1
    assert gateway.answer(listing, m.RouterListReply([], False)) == []
    refused, stop = gateway.answer(late, info("late", 8))
    assert error_of([refused])[0] is Status.SHUTTING_DOWN
    assert isinstance(stop, Stop)
    assert gateway.feed(ev.SubscribeCompleted(follow.ticket, None)) == []


def test_routers_catch_up_for_the_topic_of_the_name_and_no_other(gateway):
    """RT-20: a key reaches topics by name, so the id is ours; whom else they ask is for schedulers to say."""
    gateway.know("t")
    asked = only(gateway.ask(m.RoutesSettle("t", 99, 500, hops=3, is_own=True)), ev.AskShard)
    assert (asked.shard, asked.message) == (ev.SCHEDULER, m.RoutesSettle("t", 7, 500))
    assert only(gateway.answer(asked, m.RoutesSettled("t")), Reply).message == m.RoutesSettled("t")


def test_an_error_the_shard_gives_is_passed_on(gateway):
    gateway.know("t")
    asked = only(gateway.ask(m.Append("t", 1, idempotency_key="k"), frame()), ev.AskShard)
    effects = gateway.answer(asked, error=StaleEpoch("old", sent_epoch=1, epoch=2))
    assert error_of(effects) == (Status.STALE_EPOCH, {"sent_epoch": 1, "epoch": 2})


def test_the_test_frames_are_frames():
    found = batch.scan(frame() + frame(count=2))
    assert len(found) == 2
    assert not batch.malformed(found.words).any()


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_frame_follows_is_for_the_shard_to_judge(count):
    """G3, W9: it passes the gateway as it came."""
    data = bytearray().join([frame() for _ in range(count)])
    found = batch.scan(data)
    found.words[:, layout.W_TAIL] |= batch.FOLLOWS
    batch.put_headers(batch.words_of(data), found)
    before = bytes(data)
    assert len(check_frames(m.Append("t", count), memoryview(data), 1 << 30).offsets) == count + 1
    assert bytes(data) == before


# -- errors of ours ---------------------------------------------------------------------------------------


def test_an_error_that_nobody_expected_ends_its_request_and_not_the_gateway(gateway, monkeypatch):
    """No client can end one incarnation after another."""
    gateway.know("t")
    monkeypatch.setattr(gateway.core._asker, "ask", lambda *_: 1 // 0)
    reply, failed = gateway.ask(m.TopicState("t"))
    assert Status(reply.message.status) is Status.INTERNAL
    assert isinstance(failed.error, ZeroDivisionError)
    assert gateway.core.requests_held == 0
