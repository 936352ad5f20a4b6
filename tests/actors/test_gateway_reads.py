"""The gateway's decisions about deletes, times, cold records and frames that a client already holds."""

from ringlog.access.key_ring import KeyRing
from ringlog.access.keys import Principal
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.core import GatewayCore, GatewayIdentity
from ringlog.contract import DrainRequested, Reply, Stop, Tick
from ringlog.envelope import messages as m
from ringlog.errors import NotReady, StaleEpoch, Status
from tests.support.gateway_jobs import only

KEYS = KeyRing(
    [
        ("r-id", Principal("reader", frozenset({"read"}), ("t",))),
        ("w-id", Principal("writer", frozenset({"write", "admin"}))),
        ("d-id", Principal("deleter", frozenset({"delete"}), ("t",))),
    ]
)
US = 1_700_000_000_000_000


class Driver:
    """A gateway that knows the topic `t`, with helpers that send requests."""

    def __init__(self, **bounds):
        self.core = GatewayCore(GatewayIdentity("e" * 32, "0", 1, 2, 9, 4096, **bounds), KEYS)
        self.feed(Tick(US, 1))

    def feed(self, *events):
        effects = self.core.handle(events)
        self.core.check()
        return effects

    def ask(self, message, user):
        """Return the effects of a request after its topic is resolved."""
        effects = self.feed(ev.ClientRequestReceived(b"c", user, 1, message, None))
        if effects and isinstance(effects[0], ev.AskShard) and isinstance(effects[0].message, m.TopicResolve):
            info = m.TopicInfo("t", 7, 3, 1, 0, False, {})
            effects = self.feed(ev.ShardAnswered(effects[0].ticket, info))
        return effects

    def read(self, message, **facts):
        """Request a read and answer its Locate."""
        (asked,) = self.ask(message, "r-id")
        assert isinstance(asked.message, m.Locate)
        return self.feed(ev.ShardAnswered(asked.ticket, located(**facts)))


def located(head=100, version=4, **facts):
    facts = {"earliest_seq": 1, "cap_floor": 1, "ttl_floor": 1, "trim_floor": 1, "recreated": False} | facts
    return m.Located("t", 7, 3, 1, 0, head, extents=[], version=version, **facts)


def status_of(effects):
    return Status(only(effects, Reply).message.status)


def test_deleting_records_needs_the_scope_delete_and_a_matching_prefix():
    """The scopes `write` and `admin` do not include `delete`."""
    delete = m.RecordsDelete("t", 5)
    for user in ("r-id", "w-id"):
        assert status_of(Driver().ask(delete, user)) is Status.FORBIDDEN
    assert status_of(Driver().ask(m.RecordsDelete("other", 5), "d-id")) is Status.FORBIDDEN
    gateway = Driver()
    asked = only(gateway.ask(delete, "d-id"), ev.AskShard)
    assert (asked.shard, asked.message) == (1, delete)
    done = m.RecordsDeleted("t", 4, 5, 9, 5, 50)
    assert only(gateway.feed(ev.ShardAnswered(asked.ticket, done)), Reply).message == done


def test_a_client_cannot_delete_single_seqs():
    """The gateway refuses a delete with `seqs`."""
    assert status_of(Driver().ask(m.RecordsDelete("t", seqs=b"x"), "d-id")) is Status.INVALID_REQUEST


def test_a_delete_with_a_stale_epoch_makes_the_gateway_resolve_again():
    gateway = Driver()
    asked = only(gateway.ask(m.RecordsDelete("t", 5, epoch=2), "d-id"), ev.AskShard)
    refused = gateway.feed(ev.ShardAnswered(asked.ticket, None, StaleEpoch("another life", topic="t")))
    assert status_of(refused) is Status.STALE_EPOCH
    again = only(
        gateway.feed(ev.ClientRequestReceived(b"c", "d-id", 2, m.RecordsDelete("t", 5), None)), ev.AskShard
    )
    assert isinstance(again.message, m.TopicResolve)


def test_a_seek_by_time_searches_from_the_first_record():
    """The request needs the scope `read`."""
    assert status_of(Driver().ask(m.SeekTime("t", 77), "d-id")) is Status.FORBIDDEN
    gateway = Driver()
    asked = only(gateway.ask(m.SeekTime("t", 77), "r-id"), ev.AskShard)
    assert asked.message == m.Locate("t", 0, 0)
    find = only(gateway.feed(ev.ShardAnswered(asked.ticket, located())), ev.FindTime)
    assert find.ts_us == 77
    reply = only(gateway.feed(ev.TimeFound(find.ticket, 42)), Reply)
    assert reply.message == m.SeekTimeReply("t", 3, 42)


def test_a_read_returns_hidden_seqs_and_their_version_with_the_frames():
    """Remote readers use the list to omit deleted records."""
    gateway = Driver()
    files = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    assert files.now_us == US
    read = ev.FramesRead(files.ticket, 2, 9, 10, 10, b"frames", hidden=b"bitmap")
    reply = only(gateway.feed(read), Reply)
    assert (reply.message.frames, reply.message.next_after) == (2, 10)
    assert (reply.message.hidden, reply.message.version) == (b"bitmap", 4)


def test_frames_that_a_client_holds_are_not_sent_again_without_a_removal():
    gateway = Driver()
    reply = only(gateway.read(m.Read("t", 10, 3, held=60, version=4)), Reply).message
    assert (reply.frames, reply.after, reply.next_after, reply.head_seq) == (0, 10, 60, 100)


def test_frames_that_a_client_holds_are_read_again_after_a_removal():
    for change in ({"version": 5}, {"cap_floor": 20, "earliest_seq": 20}, {"recreated": True}):
        effects = Driver().read(m.Read("t", 10, 3, held=60, version=4), **change)
        assert isinstance(effects[0], ev.ReadFiles)


def test_the_relocator_reads_cold_records_for_the_gateway():
    """The gateway itself never reads the cold tier."""
    gateway = Driver()
    files = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    want = m.ColdRead("topics/x.data", 4096, 8192)
    cold = only(gateway.feed(ev.FramesRead(files.ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
    assert cold.wanted == want
    again = only(gateway.feed(ev.ColdReadCompleted(cold.ticket, b"bytes")), ev.ReadFiles)
    assert (again.cold, again.cold_data) == (want, b"bytes")
    assert only(gateway.feed(ev.FramesRead(again.ticket, 1, 9, 9, 9, b"f")), Reply).message.frames == 1


def test_draining_does_not_wait_for_the_relocator():
    """It stops at the same time. The client reads again with the next engine."""
    gateway = Driver()
    waiting = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    later = only(gateway.read(m.Read("t", 1)), ev.ReadFiles)
    want = m.ColdRead("topics/x.data", 4096, 8192)
    cold = only(gateway.feed(ev.FramesRead(waiting.ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
    refused = only(gateway.feed(DrainRequested()), Reply)
    assert refused.message.status == Status.SHUTTING_DOWN
    refused, stop = gateway.feed(ev.FramesRead(later.ticket, 0, 0, 0, 0, cold=want))
    assert refused.message.status == Status.SHUTTING_DOWN
    assert isinstance(stop, Stop)
    assert gateway.feed(ev.ColdReadCompleted(cold.ticket, b"bytes")) == []


def test_an_unavailable_cold_store_is_not_ready_and_no_loss():
    """The error is `NOT_READY` with the reason `cold_unavailable`."""
    gateway = Driver()
    files = only(gateway.read(m.Read("t", 0)), ev.ReadFiles)
    want = m.ColdRead("topics/x.data", 4096, 8192)
    cold = only(gateway.feed(ev.FramesRead(files.ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
    gone = NotReady("gone", reason="cold_unavailable")
    reply = only(gateway.feed(ev.ColdReadCompleted(cold.ticket, None, gone)), Reply).message
    assert (Status(reply.status), reply.detail["reason"]) == (Status.NOT_READY, "cold_unavailable")


def test_a_read_that_needs_too_many_cold_reads_is_not_ready():
    gateway = Driver()
    effects = gateway.read(m.Read("t", 0))
    for n in range(100):
        if isinstance(effects[0], Reply):
            break
        want = m.ColdRead("topics/x.data", n * 8, n * 8 + 8)
        cold = only(gateway.feed(ev.FramesRead(effects[0].ticket, 0, 0, 0, 0, cold=want)), ev.ReadCold)
        effects = gateway.feed(ev.ColdReadCompleted(cold.ticket, b"bytes"))
    assert status_of(effects) is Status.NOT_READY


def test_a_read_returns_at_most_the_configured_number_of_records():
    for asked, given in ((0, 10), (5, 5), (1_000, 10)):
        read = only(Driver(read_limit=10).read(m.Read("t", 1, limit=asked)), ev.ReadFiles)
        assert read.limit == given
