"""The gateway's decisions about deletes, times, cold records and what a client holds already."""

from actors.gateway import events as ev
from actors.gateway.auth import KeyRing, Principal
from actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.contract import Reply, Tick
from ringlog.envelope import messages as m
from ringlog.errors import NotReady, StaleEpoch, Status

KEYS = KeyRing(
    [
        ("r-id", Principal("reader", frozenset({"read"}), ("t",))),
        ("w-id", Principal("writer", frozenset({"write", "admin"}))),
        ("d-id", Principal("deleter", frozenset({"delete"}), ("t",))),
    ]
)
US = 1_700_000_000_000_000


class Driver:
    """A gateway that knows topic `t`, and short words for what one does to it."""

    def __init__(self, **bounds):
        self.core = GatewayCore(GatewayIdentity("e" * 32, "0", 1, 2, 9, 4096, **bounds), KEYS)
        self.feed(Tick(US, 1))

    def feed(self, *events):
        effects = self.core.handle(events)
        self.core.check()
        return effects

    def ask(self, message, user):
        """The effects of a request, the topic resolved on the way."""
        effects = self.feed(ev.ClientRequestReceived(b"c", user, 1, message, None))
        if effects and isinstance(effects[0], ev.AskShard) and isinstance(effects[0].message, m.TopicResolve):
            info = m.TopicInfo("t", 7, 3, 1, 0, False, {})
            effects = self.feed(ev.ShardAnswered(effects[0].ticket, info))
        return effects

    def read(self, message, **facts):
        """Ask for a read and answer its Locate."""
        (asked,) = self.ask(message, "r-id")
        assert isinstance(asked.message, m.Locate)
        return self.feed(ev.ShardAnswered(asked.ticket, located(**facts)))


def located(head=100, version=4, **facts):
    facts = {"earliest_seq": 1, "cap_floor": 1, "ttl_floor": 1, "trim_floor": 1, "recreated": False} | facts
    return m.Located("t", 7, 3, 1, 0, head, extents=[], version=version, **facts)


def only(effects, kind):
    (effect,) = effects
    assert isinstance(effect, kind), effect
    return effect


def status_of(effects):
    return Status(only(effects, Reply).message.status)


def test_deleting_records_needs_the_scope_delete_and_the_topics_prefix():
    """A-8, A-9."""
    delete = m.RecordsDelete("t", 5)
    for user in ("r-id", "w-id"):
        assert status_of(Driver().ask(delete, user)) is Status.FORBIDDEN
    assert status_of(Driver().ask(m.RecordsDelete("other", 5), "d-id")) is Status.FORBIDDEN
    gateway = Driver()
    asked = only(gateway.ask(delete, "d-id"), ev.AskShard)
    assert (asked.shard, asked.message) == (1, delete)
    done = m.RecordsDeleted("t", 4, 5, 9, 5, 50)
    assert only(gateway.feed(ev.ShardAnswered(asked.ticket, done)), Reply).message == done


def test_numbers_are_deleted_one_by_one_by_nobody_from_outside():
    """DL-22."""
    assert status_of(Driver().ask(m.RecordsDelete("t", seqs=b"x"), "d-id")) is Status.INVALID_REQUEST


def test_a_delete_for_another_life_makes_the_gateway_look_again():
    gateway = Driver()
    asked = only(gateway.ask(m.RecordsDelete("t", 5, epoch=2), "d-id"), ev.AskShard)
    refused = gateway.feed(ev.ShardAnswered(asked.ticket, None, StaleEpoch("another life", topic="t")))
    assert status_of(refused) is Status.STALE_EPOCH
    again = only(
        gateway.feed(ev.ClientRequestReceived(b"c", "d-id", 2, m.RecordsDelete("t", 5), None)), ev.AskShard
    )
    assert isinstance(again.message, m.TopicResolve)


def test_a_time_is_looked_up_in_what_is_stored_from_the_start():
    """Needs the scope read."""
    assert status_of(Driver().ask(m.SeekTime("t", 77), "d-id")) is Status.FORBIDDEN
    gateway = Driver()
    asked = only(gateway.ask(m.SeekTime("t", 77), "r-id"), ev.AskShard)
    assert asked.message == m.Locate("t", 0, 0)
    find = only(gateway.feed(ev.ShardAnswered(asked.ticket, located())), ev.FindTime)
    assert find.ts_us == 77
    reply = only(gateway.feed(ev.TimeFound(find.ticket, 42)), Reply)
    assert reply.message == m.SeekTimeReply("t", 3, 42)


def test_what_is_hidden_goes_with_the_frames_and_the_version_it_was_made_from():
    """DL-9 for remote readers."""
    gateway = Driver()
    files = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    assert files.now_us == US
    read = ev.FramesRead(files.ticket, 2, 9, 10, 10, b"frames", hidden=b"bitmap")
    reply = only(gateway.feed(read), Reply)
    assert (reply.message.frames, reply.message.next_after) == (2, 10)
    assert (reply.message.hidden, reply.message.version) == (b"bitmap", 4)


def test_frames_that_a_client_holds_are_not_sent_again_while_nothing_was_removed():
    gateway = Driver()
    reply = only(gateway.read(m.Read("t", 10, 3, held=60, version=4)), Reply).message
    assert (reply.frames, reply.after, reply.next_after, reply.head_seq) == (0, 10, 60, 100)


def test_frames_that_a_client_holds_are_read_anew_after_a_removal():
    for change in ({"version": 5}, {"cap_floor": 20, "earliest_seq": 20}, {"recreated": True}):
        effects = Driver().read(m.Read("t", 10, 3, held=60, version=4), **change)
        assert isinstance(effects[0], ev.ReadFiles)


def test_cold_records_are_fetched_by_the_relocator_and_never_by_the_gateway():
    """TI-9."""
    gateway = Driver()
    files = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    want = m.ColdRead("topics/x.data", 4096, 8192)
    cold = only(gateway.feed(ev.FramesRead(files.ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
    assert cold.wanted == want
    again = only(gateway.feed(ev.ColdReadCompleted(cold.ticket, b"bytes")), ev.ReadFiles)
    assert (again.cold, again.cold_data) == (want, b"bytes")
    assert only(gateway.feed(ev.FramesRead(again.ticket, 1, 9, 9, 9, b"f")), Reply).message.frames == 1


def test_a_cold_store_that_does_not_answer_is_not_ready_and_no_loss():
    """TI-10."""
    gateway = Driver()
    files = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    want = m.ColdRead("topics/x.data", 4096, 8192)
    cold = only(gateway.feed(ev.FramesRead(files.ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
    gone = NotReady("gone", reason="cold_unavailable")
    reply = only(gateway.feed(ev.ColdReadCompleted(cold.ticket, None, gone)), Reply).message
    assert (Status(reply.status), reply.detail["reason"]) == (Status.NOT_READY, "cold_unavailable")


def test_cold_records_that_keep_moving_end_in_an_answer():
    gateway = Driver()
    effects = gateway.read(m.Read("t", 0))
    for n in range(100):
        if isinstance(effects[0], Reply):
            break
        want = m.ColdRead("topics/x.data", n * 8, n * 8 + 8)
        cold = only(gateway.feed(ev.FramesRead(effects[0].ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
        effects = gateway.feed(ev.ColdReadCompleted(cold.ticket, b"bytes"))
    assert status_of(effects) is Status.NOT_READY


def test_no_answer_has_more_records_than_the_limit_of_the_settings():
    for asked, given in ((0, 10), (5, 5), (1_000, 10)):
        read = only(Driver(read_limit=10).read(m.Read("t", 1, limit=asked)), ev.ReadFiles)
        assert read.limit == given
