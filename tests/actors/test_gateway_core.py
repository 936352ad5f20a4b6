"""The decisions of the gateway core: events in, effects out."""

import msgspec
import numpy as np
import pytest

from ringlog.access.key_ring import LOCAL_ID, KeyRing
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.actors.gateway.front_end import held_requests
from ringlog.actors.gateway.replies import error_reply
from ringlog.actors.gateway.requests.append_validation import check_frames
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import (
    CorruptData,
    DiskError,
    NotReady,
    RequestTimeout,
    StaleEpoch,
    Status,
    TopicIncompatible,
    TopicNotFound,
)
from ringlog.frame import batch, layout
from ringlog.frame.settle_entry import WORDS, refused_entry
from ringlog.limits import (
    GATEWAY_BYTES_PER_CONNECTION_MAX,
    GATEWAY_REQUESTS_PER_CONNECTION_MAX,
    GRANTS_PER_MESSAGE_MAX,
)
from ringlog.placement import home_shard
from tests.support.gateway_jobs import only
from tests.support.log_file import sealed_frame

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
    """A gateway core, with helpers that send requests and answer effects."""

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
        """Make the gateway resolve a topic."""
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


def error_of(effects):
    reply = only(effects, Reply)
    assert isinstance(reply.message, m.ErrorReply)
    return Status(reply.message.status), reply.message.detail


# -- access ---------------------------------------------------------------------------------------------


def test_hello_and_ping_need_no_shard(gateway):
    welcome = only(gateway.ask(m.Hello(1, "x")), Reply).message
    assert (welcome.shard, welcome.shards, welcome.incarnation) == (-1, 2, 9)
    assert only(gateway.ask(m.Ping()), Reply).message.incarnation == 9
    assert error_of(gateway.ask(m.Hello(2, "x")))[0] is Status.INVALID_REQUEST


def test_configured_limits_are_announced_and_enforced():
    """The shards enforce `limits.max_record_bytes` and `limits.max_batch_records`, the gateway the others."""
    gateway = Driver(body_bytes_max=1 << 20, read_limit=10, record_bytes_max=99, batch_records_max=7)
    bounds = only(gateway.ask(m.Hello(1, "x")), Reply).message.limits
    assert (bounds["request_bytes"], bounds["read_limit"]) == (1 << 20, 10)
    assert (bounds["record_bytes"], bounds["batch_records"]) == (99, 7)
    gateway.know("t")
    large = frame(size=bounds["frame_bytes"])
    assert error_of(gateway.ask(m.Append("t", 1), large))[0] is Status.PAYLOAD_TOO_LARGE
    gateway.ask(m.Append("t", 1), frame(size=1 << 20))


def test_an_unknown_key_reaches_no_shard(gateway):
    """No unauthorized request reaches a shard (G1)."""
    for user in ("", "c-id", "alice"):
        assert error_of(gateway.ask(m.TopicState("t"), user=user))[0] is Status.UNAUTHORIZED


def test_a_refusal_does_not_reveal_whether_a_topic_exists(gateway):
    """Outside the key's prefixes, the error is the same for an existing and for a missing topic (RF-106)."""
    gateway.know("secret")
    replies = [gateway.ask(m.TopicState(t), client=ALICE, user="a-id") for t in ("secret", "absent")]
    first, second = (error_of(effects) for effects in replies)
    assert (first[0], second[0]) == (Status.FORBIDDEN, Status.FORBIDDEN)
    assert set(first[1]) == set(second[1]) == {"topic"}


def test_a_removed_key_is_refused_at_the_next_request(gateway):
    """Local clients are not affected."""
    gateway.feed(ev.KeysLoaded(KeyRing()))
    assert error_of(gateway.ask(m.TopicState("t")))[0] is Status.UNAUTHORIZED
    assert only(gateway.ask(m.TopicState("t"), user=LOCAL_ID), ev.AskShard)


def test_messages_between_engine_processes_are_refused(gateway):
    """Even a key with all scopes cannot send them."""
    for inside in (m.RingOpen("c", 1, 0), m.EngineStop(), m.RingDetach("r", True)):
        assert error_of(gateway.ask(inside))[0] is Status.FORBIDDEN


# -- forwarding -----------------------------------------------------------------------------------------


def test_a_request_goes_to_the_topics_shard_after_the_home_shard_resolved_the_name(gateway):
    asked = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    assert (asked.shard, asked.message) == (home_shard("t", 2), m.TopicResolve("t"))
    forwarded = only(gateway.answer(asked, info("t", shard=1)), ev.AskShard)
    assert (forwarded.shard, forwarded.message) == (1, m.TopicState("t"))
    again = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    assert again.message == m.TopicState("t")
    only(gateway.answer(forwarded, m.TopicDeleted("t", True)), Reply)


def test_a_topic_that_is_not_found_is_removed_from_the_cache(gateway):
    gateway.know("t")
    asked = only(gateway.ask(m.TopicState("t")), ev.AskShard)
    assert error_of(gateway.answer(asked, error=TopicNotFound("no", topic="t")))[0] is Status.TOPIC_NOT_FOUND
    assert isinstance(only(gateway.ask(m.TopicState("t")), ev.AskShard).message, m.TopicResolve)


def test_deleting_a_missing_topic_is_no_error(gateway):
    """A delete is idempotent."""
    asked = only(gateway.ask(m.TopicDelete("t")), ev.AskShard)
    reply = only(gateway.answer(asked, error=TopicNotFound("no", topic="t")), Reply)
    assert reply.message == m.TopicDeleted("t", False)


def test_the_reply_to_a_delete_lists_only_routers_within_the_keys_prefixes(gateway):
    """The delete removes the topic's routers. A key must not learn names outside its prefixes."""
    gateway.know("a.t")
    asked = only(gateway.ask(m.TopicDelete("a.t"), user="d-id"), ev.AskShard)
    reply = only(gateway.answer(asked, m.TopicDeleted("a.t", True, ["a.r", "b.r"])), Reply)
    assert reply.message == m.TopicDeleted("a.t", True, ["a.r"])


def test_errors_of_a_shard_reveal_no_file_path(gateway):
    """A timeout becomes `NOT_READY`. Errors that go to clients contain no path of the server."""
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


def test_a_list_merges_the_shards_in_name_order(gateway):
    """The page has the smallest names of all shards. `more` is set if names remain."""
    first = only(gateway.ask(m.TopicList("", "", 3)), ev.AskShard)
    second = only(gateway.answer(first, m.TopicListReply([state("a"), state("d")], False)), ev.AskShard)
    assert (first.shard, second.shard) == (0, 1)
    reply = only(gateway.answer(second, m.TopicListReply([state("b"), state("c")], False)), Reply)
    assert [t.topic for t in reply.message.topics] == ["a", "b", "c"]
    assert reply.message.more


def test_a_list_shows_only_topics_within_the_keys_prefixes(gateway):
    """The gateway requests only the allowed prefixes from the shards."""
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


def test_frames_go_into_the_ring_unchanged(gateway):
    """The gateway forwards frames unchanged, under the client's own numbers (G3)."""
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
def test_an_append_with_invalid_frames_is_refused(gateway, message, data, status):
    """Only appends of the named topic pass (G3, RF-100). The deletion of a topic is a frame as well."""
    gateway.know("t")
    assert error_of(gateway.ask(message, data))[0] is status


def test_frames_of_another_topic_are_refused_after_the_name_is_resolved_again(gateway):
    """The topic that is written must be the topic whose name was authorized."""
    gateway.know("t", topic_id=7)
    asked = only(gateway.ask(m.Append("t", 1), frame(topic_id=8)), ev.AskShard)
    assert isinstance(asked.message, m.TopicResolve)
    assert error_of(gateway.answer(asked, info("t", 7)))[0] is Status.STALE_EPOCH
    asked = only(gateway.ask(m.Append("t", 1), frame(topic_id=9)), ev.AskShard)
    assert only(gateway.answer(asked, info("t", 9)), ev.PushFrames)


def test_a_recreated_topic_is_resolved_again(gateway):
    gateway.know("t")
    push = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    stale = np.array([refused_entry(0, Status.STALE_EPOCH, 7, 1)], dtype=np.uint64).tobytes()
    only(gateway.feed(ev.FramesSettled(push.ticket, stale)), Reply)
    assert isinstance(only(gateway.ask(m.Append("t", 1), frame()), ev.AskShard).message, m.TopicResolve)


def test_appends_that_wait_for_a_name_keep_their_order(gateway):
    """A later producer number must not overtake an earlier one (G2)."""
    asked = only(gateway.ask(m.Append("t", 1), frame(size=1)), ev.AskShard)
    assert gateway.ask(m.Append("t", 1), frame(size=2)) == []
    assert gateway.ask(m.Append("t", 1), frame(size=3)) == []
    pushes = gateway.answer(asked, info("t"))
    assert [push.data for push in pushes] == [frame(size=n) for n in (1, 2, 3)]


def test_frames_too_large_for_the_ring_go_by_socket_in_order(gateway):
    """A client's appends to one topic reach the shard in the order of sending (G2)."""
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


def test_a_failed_append_does_not_block_the_next_one(gateway):
    gateway.know("t")
    first = only(gateway.ask(m.Append("t", 1, idempotency_key="k"), frame()), ev.AskShard)
    assert gateway.ask(m.Append("t", 1, idempotency_key="l"), frame()) == []
    effects = gateway.answer(first, error=RequestTimeout("late", outcome="unknown"))
    assert {type(effect) for effect in effects} == {Reply, ev.AskShard}


def test_a_topic_is_created_at_its_home_shard(gateway):
    """The gateway resolves the name first and then forwards the append, which creates the topic."""
    asked = only(gateway.ask(m.Append("new", 1, create=True), frame(topic_id=0)), ev.AskShard)
    assert isinstance(asked.message, m.TopicResolve), "the topic may exist on another shard"
    asked = only(gateway.answer(asked, error=TopicNotFound("no", topic="new")), ev.AskShard)
    assert (asked.shard, asked.attachment) == (home_shard("new", 2), frame(topic_id=0))
    reply = only(gateway.answer(asked, m.Appended("new", 3, 1, True, entries(1))), Reply)
    assert reply.message.created


def test_a_request_follows_the_pointer_of_the_home_shard(gateway):
    """After a change of the shard count, a topic may be on another shard than its home shard."""
    asked = only(gateway.ask(m.Append("t", 1, create=True), frame(topic_id=0)), ev.AskShard)
    pointer = m.TopicInfo("t", 0, 0, 1 - asked.shard, -1, False, {})
    again = only(gateway.answer(asked, pointer), ev.AskShard)
    assert (again.shard, again.message) == (1 - asked.shard, m.TopicResolve("t"))
    found = m.TopicInfo("t", 7, 1, 1 - asked.shard, 0, False, {"durability": "disk"})
    append = only(gateway.answer(again, found), ev.AskShard)
    assert (append.shard, append.message) == (1 - asked.shard, m.Append("t", 1, create=True))


@pytest.mark.parametrize("message", [m.TopicResolve("t"), m.TopicState("t")])
def test_shards_that_point_to_each_other_are_asked_once_each(gateway, message):
    """A request never circles between shards. A pointer to a shard without the topic is not cached."""
    asked = only(gateway.ask(message), ev.AskShard)
    back = m.TopicInfo("t", 0, 0, asked.shard, -1, False, {})
    again = only(gateway.answer(asked, m.TopicInfo("t", 0, 0, 1 - asked.shard, -1, False, {})), ev.AskShard)
    status, detail = error_of(gateway.answer(again, back))
    assert (status, detail) == (Status.NOT_READY, {"topic": "t"})
    assert only(gateway.ask(message), ev.AskShard).shard == asked.shard, "the pointer must not be cached"


def test_the_refusal_of_a_router_names_no_topic_that_the_key_does_not_cover(gateway):
    message = m.RouterCreate("a.r", "a.s", "a.d")
    asked = only(gateway.ask(message, client=b"tdora", user="d-id"), ev.AskShard)
    refused = TopicIncompatible("no", router="a.r", existing_source="secret", existing_dest="a.d")
    _, detail = error_of(gateway.answer(asked, error=refused))
    assert detail == {"router": "a.r", "existing_dest": "a.d"}


def test_an_inline_config_needs_admin_only_to_create(gateway):
    """If the topic exists, an append with an inline configuration needs only `write`."""
    message = m.Append("a.new", 1, create=True, config={"durability": "fsync"})
    asked = only(gateway.ask(message, frame(topic_id=0), client=ALICE, user="a-id"), ev.AskShard)
    assert isinstance(asked.message, m.TopicResolve)
    status, detail = error_of(gateway.answer(asked, error=TopicNotFound("no", topic="a.new")))
    assert (status, detail) == (Status.FORBIDDEN, {"topic": "a.new", "required_scope": "admin"})
    asked = only(gateway.ask(message, frame(topic_id=0), client=ALICE, user="a-id"), ev.AskShard)
    there = only(gateway.answer(asked, info("a.new")), ev.AskShard)
    assert (there.shard, there.message) == (1, msgspec.structs.replace(message, create=False))


def test_a_deleted_topic_in_the_cache_does_not_let_a_writer_configure_a_topic(gateway):
    """The append of a key without `admin` never creates, so the shard refuses it. The reply is the same."""
    gateway.know("a.new")
    message = m.Append("a.new", 1, create=True, config={"durability": "fsync"})
    asked = only(gateway.ask(message, frame(topic_id=0), client=ALICE, user="a-id"), ev.AskShard)
    assert asked.message.create is False
    status, detail = error_of(gateway.answer(asked, error=TopicNotFound("no", topic="a.new")))
    assert (status, detail) == (Status.FORBIDDEN, {"topic": "a.new", "required_scope": "admin"})


def test_requests_in_flight_are_bounded_for_each_connection(gateway):
    """At the bound the reply is `Throttled`. Each answer of a shard frees one place (G5)."""
    gateway.know("t")
    pushes = [only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames) for _ in range(1024)]
    assert len(pushes) == GATEWAY_REQUESTS_PER_CONNECTION_MAX
    status, detail = error_of(gateway.ask(m.Append("t", 1), frame()))
    assert (status, detail["limit"]) == (Status.THROTTLED, "requests_per_connection")
    assert detail["retry_after_ms"] > 0
    assert only(gateway.ask(m.Append("t", 1), frame(), client=b"tother"), ev.PushFrames)
    gateway.feed(ev.FramesSettled(pushes[0].ticket, entries(1)))
    assert only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)


def test_returned_grants_of_one_message_are_bounded(gateway):
    """The relay does work for each row, so a message of any size would keep the gateway busy for seconds."""
    for count, detail in (
        (GRANTS_PER_MESSAGE_MAX, None),
        (GRANTS_PER_MESSAGE_MAX + 1, "found"),
        (0.5, "bytes"),
    ):
        effects = gateway.ask(m.GrantsReturned(1), memoryview(bytes(int(32 * count))))
        if detail is None:
            assert len(only(effects, ev.ReturnGrants).rows) == count
            continue
        status, facts = error_of(effects)
        assert status is Status.INVALID_REQUEST
        assert detail in facts
        assert not [effect for effect in effects if isinstance(effect, ev.ReturnGrants)]


def test_bytes_in_flight_are_bounded_for_each_connection(gateway, monkeypatch):
    """Held bytes never exceed the bound of their connection (G5)."""
    assert GATEWAY_BYTES_PER_CONNECTION_MAX > 2 * 64 * (1 << 20)
    monkeypatch.setattr(held_requests, "GATEWAY_BYTES_PER_CONNECTION_MAX", 2 * len(frame()))
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


def test_a_read_returns_a_tombstone_and_stops_before_a_lost_range(gateway):
    """Lost records are reported, never skipped silently."""
    gateway.know("t")
    facts = located(head=300, earliest_seq=4, cap_floor=4, lost=[34, 257])
    read = read_as_far_as_files(gateway, m.Read("t", 0), facts)
    assert (read.after, read.stop) == (3, 33)
    reply = only(gateway.feed(ev.FramesRead(read.ticket, 1, 30, 33, 33, b"f")), Reply).message
    assert (reply.gap_from, reply.gap_to, reply.reason) == (1, 3, "cap")
    assert (reply.next_after, reply.caught_up) == (33, False)


def test_a_waiting_read_reads_again_when_the_head_changes(gateway):
    """While it waits, the read holds only a watch of its topic."""
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


def waiting_read(gateway):
    gateway.know("a.t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("a.t", 5, wait_ms=30_000), located("a.t"))
    return only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)


@pytest.mark.parametrize(
    ("keys", "status"),
    [
        (KeyRing(), Status.UNAUTHORIZED),
        (KeyRing([("b-id", Principal("bob", SCOPES, ("b.",)))]), Status.FORBIDDEN),
        (KeyRing([("b-id", Principal("bob", frozenset({"write"})))]), Status.FORBIDDEN),
    ],
    ids=["revoked", "narrower prefixes", "fewer scopes"],
)
def test_a_waiting_read_of_a_changed_key_is_refused_at_once(gateway, keys, status):
    watch = waiting_read(gateway)
    unwatch, reply, ended = gateway.feed(ev.KeysLoaded(keys))
    assert unwatch == ev.UnwatchTopic(watch.ticket)
    assert error_of([reply])[0] is status
    assert ended == ev.EndChangedSubscriptions(keys)
    assert gateway.feed(ev.TopicHeadChanged(watch.ticket)) == []
    assert gateway.core.requests_held == 0


def test_a_waiting_read_of_an_unchanged_key_goes_on(gateway):
    watch = waiting_read(gateway)
    assert gateway.feed(ev.KeysLoaded(KEYS)) == [ev.EndChangedSubscriptions(KEYS)]
    only(gateway.feed(ev.TopicHeadChanged(watch.ticket)), ev.AskShard)


def test_a_read_that_is_with_a_shard_when_its_key_is_revoked_returns_no_records(gateway):
    gateway.know("t")
    asked = only(gateway.ask(m.Read("t", 2)), ev.AskShard)
    only(gateway.feed(ev.KeysLoaded(KeyRing())), ev.EndChangedSubscriptions)
    assert error_of(gateway.answer(asked, located()))[0] is Status.UNAUTHORIZED


def test_an_accepted_append_ends_with_its_ack_although_its_key_is_revoked(gateway):
    """It may be applied already. A refusal would hide that."""
    gateway.know("t")
    push = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    only(gateway.feed(ev.KeysLoaded(KeyRing())), ev.EndChangedSubscriptions)
    assert isinstance(
        only(gateway.feed(ev.FramesSettled(push.ticket, entries(1))), Reply).message, m.Appended
    )


def test_a_waiting_read_ends_at_its_timeout(gateway):
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=1000), located())
    watch = only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)
    assert gateway.feed(Tick(0, 999 * MS)) == []
    unwatch, reply = gateway.feed(Tick(0, 1000 * MS))
    assert unwatch == ev.UnwatchTopic(watch.ticket)
    assert (reply.message.caught_up, reply.message.frames) == (True, 0)
    assert gateway.feed(ev.TopicHeadChanged(watch.ticket)) == []


def test_wait_ms_is_limited_to_30_seconds(gateway):
    """A longer wait is shortened, not refused."""
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=10**9), located())
    gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5))
    assert gateway.core.next_deadline_ns() == 30_000 * MS


@pytest.mark.parametrize("wrong", [{"after": -1}, {"epoch": -1}, {"limit": -1}, {"max_bytes": -5}])
def test_negative_numbers_are_refused(gateway, wrong):
    """MessagePack decodes a negative seq without an error."""
    assert error_of(gateway.ask(m.Read(**({"topic": "t", "after": 0} | wrong))))[0] is Status.INVALID_REQUEST


def test_a_damaged_record_is_an_error_that_names_it(gateway):
    """The error names topic and seq, but no file."""
    gateway.know("t")
    read = read_as_far_as_files(gateway, m.Read("t", 2), located())
    error = CorruptData("damaged", topic="t", seq=3, file="wal", offset=1)
    status, detail = error_of(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 2, None, error)))
    assert status is Status.INTERNAL
    assert detail == {"topic": "t", "seq": 3, "reason": "corrupt_segment"}


# -- disconnects and draining ---------------------------------------------------------------------------


def test_requests_of_a_disconnected_client_are_dropped(gateway):
    """Waiting reads end at once. Forwarded requests end with the shard's answer, without a reply."""
    gateway.know("t")
    gateway.feed(Tick(0, 0))
    read = read_as_far_as_files(gateway, m.Read("t", 5, wait_ms=1000), located())
    watch = only(gateway.feed(ev.FramesRead(read.ticket, 0, 0, 0, 5)), ev.WatchTopic)
    push = only(gateway.ask(m.Append("t", 1), frame()), ev.PushFrames)
    assert gateway.feed(ev.ClientDisconnected(BOB)) == [ev.UnwatchTopic(watch.ticket)]
    assert gateway.core.requests_held == 1
    assert gateway.feed(ev.FramesSettled(push.ticket, entries(1))) == []
    assert gateway.core.requests_held == 0


def test_draining_ends_waiting_reads_refuses_new_requests_and_stops_after_the_last_reply(gateway):
    """The exit code is 0."""
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


def test_draining_does_not_wait_for_schedulers(gateway):
    """Schedulers drain at the same time. Pending and later subscriptions are refused."""
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


def test_a_settle_request_gets_the_topic_id_of_its_name(gateway):
    """A key has access by name, so the gateway fills in the id. It drops `hops` and `is_own`."""
    gateway.know("t")
    asked = only(gateway.ask(m.RoutesSettle("t", 99, 500, hops=3, is_own=True)), ev.AskShard)
    assert (asked.shard, asked.message) == (ev.SCHEDULER, m.RoutesSettle("t", 7, 500))
    assert only(gateway.answer(asked, m.RoutesSettled("t")), Reply).message == m.RoutesSettled("t")


def test_an_error_of_the_shard_is_forwarded(gateway):
    gateway.know("t")
    asked = only(gateway.ask(m.Append("t", 1, idempotency_key="k"), frame()), ev.AskShard)
    effects = gateway.answer(asked, error=StaleEpoch("old", sent_epoch=1, epoch=2))
    assert error_of(effects) == (Status.STALE_EPOCH, {"sent_epoch": 1, "epoch": 2})


def test_the_frames_of_these_tests_are_valid():
    found = batch.scan(frame() + frame(count=2))
    assert len(found) == 2
    assert not batch.malformed(found.words).any()


@pytest.mark.parametrize("count", [1, 3])
def test_a_frame_that_follows_another_passes_unchanged(count):
    """The gateway forwards frames unchanged (G3). The shard checks the order of frames (W9)."""
    data = bytearray().join([frame() for _ in range(count)])
    found = batch.scan(data)
    found.words[:, layout.W_TAIL] |= batch.FOLLOWS
    batch.write_headers(batch.words_of(data), found)
    before = bytes(data)
    assert len(check_frames(m.Append("t", count), memoryview(data), 1 << 30).offsets) == count + 1
    assert bytes(data) == before


# -- internal errors --------------------------------------------------------------------------------------


def test_an_unexpected_error_ends_its_request_and_not_the_gateway(gateway, monkeypatch):
    """Otherwise a client could end one incarnation after another (G6)."""
    gateway.know("t")
    monkeypatch.setattr(gateway.core._context, "ask", lambda *_: 1 // 0)
    reply, failed = gateway.ask(m.TopicState("t"))
    assert Status(reply.message.status) is Status.INTERNAL
    assert isinstance(failed.error, ZeroDivisionError)
    assert gateway.core.requests_held == 0


@pytest.mark.parametrize(
    ("quoted", "seen"),
    [
        ("cannot open /var/lib/ringlog/wal/shard-00/a.wal: EIO", "cannot open a.wal: EIO"),
        ("no such file (file='/srv/data/t.seg', offset=7)", "no such file (file='t.seg', offset=7)"),
        ("the filter eu/+/orders is too long", "the filter eu/+/orders is too long"),
        ("wal/shard-01", "wal/shard-01"),
    ],
)
def test_an_error_to_a_client_names_no_directory_of_the_server(quoted: str, seen: str) -> None:
    for name in ("reason", "error", "cause", "directory"):
        reply = error_reply(NotReady("not ready", topic="/a/topic", **{name: quoted}))
        assert reply.detail == {"topic": "/a/topic", name: seen}
