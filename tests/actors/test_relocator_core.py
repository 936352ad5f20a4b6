"""Cold reads: bounded memory, bounded work, and one reply for each request."""

from __future__ import annotations

import pytest

from ringlog.actors.relocator.core import BlockCache, ColdReads, Fetch, Fetched
from ringlog.contract import ControlReceived, Reply, Tick
from ringlog.envelope import messages as m
from ringlog.errors import ColdUnavailable, CorruptData, Status
from ringlog.limits import COLD_BLOCK_BYTES, COLD_READ_THREADS, COLD_READS_QUEUED_MAX, FRAME_BYTES_MAX

B = COLD_BLOCK_BYTES
PATH = "packs/pack-0001000000000001.data"
DATA = bytes(range(256)) * (4 * B // 256) + b"the end"


def reads(cache: int = 64 * B) -> ColdReads:
    return ColdReads(cache, timeout_ns=1_000)


def ask(core: ColdReads, start: int, stop: int, *, client: bytes = b"a", path: str = PATH, now: int = 0):
    request = ControlReceived(client, 7, m.ColdRead(path, start, stop))
    return tick(core, now) + core.handle([request])


def tick(core: ColdReads, now_ns: int) -> list[Reply]:
    return core.handle([Tick(0, now_ns)])


def fetch_of(effects) -> Fetch:
    (effect,) = effects
    assert isinstance(effect, Fetch)
    return effect


def done(core: ColdReads, fetch: Fetch) -> list[Reply]:
    replies = core.handle([Fetched(fetch.ticket, DATA[fetch.start : fetch.stop])])
    core.check()
    return replies


def test_a_read_fetches_whole_blocks_and_the_next_read_comes_from_memory():
    """The reply contains only the requested range."""
    core = reads()
    fetch = fetch_of(ask(core, B + 10, 2 * B + 10))
    assert (fetch.path, fetch.start, fetch.stop) == (PATH, B, 3 * B)
    (reply,) = done(core, fetch)
    assert reply.message == m.ColdBytes(B)
    assert reply.attachment == DATA[B + 10 : 2 * B + 10]
    (again,) = ask(core, B + 20, B + 30)
    assert again.attachment == DATA[B + 20 : B + 30]
    assert (core.requested, core.hits) == (2, 1)


def test_a_read_at_the_end_of_a_part_gets_a_short_reply():
    core = reads()
    (reply,) = done(core, fetch_of(ask(core, 4 * B, 4 * B + 100)))
    assert reply.attachment == b"the end"
    (again,) = ask(core, 4 * B + 4, 4 * B + 200)
    assert again.attachment == b"end"


def test_reads_of_a_block_that_is_being_fetched_share_one_fetch():
    core = reads()
    fetch = fetch_of(ask(core, 0, 10, client=b"a"))
    assert ask(core, 10, 20, client=b"b") == []
    assert [reply.client for reply in done(core, fetch)] == [b"a", b"b"]
    assert core.next_deadline_ns() is None


def test_too_many_reads_are_throttled_and_waiting_reads_are_not():
    """A completed fetch frees one place."""
    core = reads()
    most = COLD_READ_THREADS + COLD_READS_QUEUED_MAX
    fetches = [fetch_of(ask(core, n * B, n * B + 1)) for n in range(most)]
    (refused,) = ask(core, most * B, most * B + 1)
    assert refused.message.status == Status.THROTTLED
    assert refused.message.detail["retry_after_ms"] > 0
    core.handle([Fetched(fetches[0].ticket, b"x")])
    fetch_of(ask(core, most * B, most * B + 1))


def test_a_timeout_is_unavailable_and_late_bytes_serve_the_next_read():
    """Each request gets exactly one reply."""
    core = reads()
    fetch = fetch_of(ask(core, 0, 10, now=0))
    assert tick(core, 999) == []
    assert core.next_deadline_ns() == 1_000
    (late,) = tick(core, 1_000)
    assert late.message.status == Status.NOT_READY
    assert late.message.detail["reason"] == "cold_unavailable"
    assert done(core, fetch) == []
    (hit,) = ask(core, 0, 10)
    assert hit.attachment == DATA[:10]


@pytest.mark.parametrize("error", [ColdUnavailable("gone"), CorruptData("other bytes", file=PATH)])
def test_a_store_failure_is_never_reported_as_the_end_of_data(error):
    """The reply is `NOT_READY` with the reason `cold_unavailable`."""
    core = reads()
    fetch = fetch_of(ask(core, 0, 10))
    (reply,) = core.handle([Fetched(fetch.ticket, None, error)])
    assert reply.message.status == Status.NOT_READY
    assert reply.message.detail["reason"] == "cold_unavailable"
    assert core.failed == 1
    fetch_of(ask(core, 0, 10))


@pytest.mark.parametrize(
    ("path", "start", "stop"),
    [
        ("../etc/passwd", 0, 1),
        ("packs/../meta/engine", 0, 1),
        (PATH + ".tmp", 0, 1),
        (PATH, -1, 1),
        (PATH, 5, 5),
        (PATH, 0, FRAME_BYTES_MAX + 1),
    ],
)
def test_an_invalid_path_or_range_is_refused(path, start, stop):
    (reply,) = ask(reads(), start, stop, path=path)
    assert reply.message.status == Status.INVALID_REQUEST


def test_the_cache_stays_within_its_size_and_evicts_the_least_recently_used_block():
    """`evict` removes all blocks of a path."""
    cache = BlockCache(2 * B)
    for n in range(3):
        cache.put(PATH, n * B, DATA[n * B : (n + 1) * B])
    assert cache.bytes == 2 * B
    assert cache.get(PATH, 0, 1) is None
    assert cache.get(PATH, B, B + 1) is not None
    cache.put(PATH, 3 * B, DATA[3 * B : 4 * B])
    assert cache.get(PATH, 2 * B, 2 * B + 1) is None
    cache.evict(PATH)
    assert cache.bytes == 0
