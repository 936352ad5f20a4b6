"""An idle shard sleeps, although a bell rings late. A busy shard starts no further threads."""

from __future__ import annotations

import select
import threading

import pytest

from ringlog import config
from ringlog.actors.wal_shard.__main__ import build
from ringlog.actors.wal_shard.events import Flush, Flushed
from ringlog.actors.wal_shard.io.flusher import Flusher
from ringlog.actors.wal_shard.io.preparer import Preparer
from ringlog.board.board import Board, ProcessField
from ringlog.board.layout import ProcessState
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import DiskError
from ringlog.ring.doorbell import make_bell
from ringlog.runtime.duty_cycle import run_duty_cycle
from ringlog.signals import StopFlag
from ringlog.testing.real_engine import wait_until

WAIT_S = 10.0


@pytest.fixture
def shard(tmp_path):
    """Run a shard in a thread of this process."""
    shm_dir = tmp_path / "s"
    shm_dir.mkdir(mode=0o700)
    (tmp_path / "d").mkdir(mode=0o700)
    board = Board.create(shm_dir, 8)
    board.process(1).set(ProcessField.INCARNATION, 1)
    make_bell(str(shm_dir / "wal_shard-00.bell"))
    settings = config.from_plain({"wal": {"shards": 1, "file_bytes": 1 << 20, "volatile_bytes": 1 << 24}})
    made = build(
        ActorBoot(
            kind="wal_shard", name="wal_shard-00", engine_id="00" * 16, incarnation=1, boot_incarnation=1,
            boot_id="00000000-0000-0000-0000-000000000001", slot=1, data_dir=str(tmp_path / "d"),
            shm_dir=str(shm_dir), supervisor_pid=1, shard=0, shards=1, config=config.to_plain(settings),
        )
    )  # fmt: skip
    stop = StopFlag(lambda: None)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_duty_cycle(made, board.process(1), stop)))
    thread.start()
    slot = board.process(1)
    try:
        wait_until(lambda: slot.state == ProcessState.READY, WAIT_S, "the shard to be ready")
        yield made
    finally:
        stop.set()
        thread.join(WAIT_S)
        stop.close()
        board.close()
    assert codes == [0]


@pytest.mark.parametrize("worker", ["_preparer", "_flusher"])
def test_a_bell_that_rings_after_its_result_wakes_the_shard_once(shard, worker):
    """The shard may take the result of a thread before the thread rings its bell. Once, the shard then found
    the bell ringing at each sleep, and used a whole CPU until the next result."""
    # The start requests one file. After it no request is pending, and no result will arrive.
    wait_until(lambda: shard._log._prepared is not None, WAIT_S, "the next file")
    bell = getattr(shard._log, worker).bell
    bell.ring()
    poll = select.poll()
    poll.register(bell.fileno(), select.POLLIN)
    wait_until(lambda: not poll.poll(0), WAIT_S, "the bell to be silent")


class Writer:
    """Records the threads that worked for it."""

    def __init__(self):
        self.threads = []

    def prepare(self, at_least, *, fill):
        self.threads.append(threading.get_native_id())
        raise DiskError("no room")

    def sync(self):
        self.threads.append(threading.get_native_id())


def take(worker):
    found = []
    wait_until(lambda: found.append(worker.take()) or found[-1] is not None, WAIT_S, "a result")
    return found[-1]


def test_every_file_is_created_by_the_same_thread():
    """A new thread may not be available. The shard would then end when its file is half full."""
    writer = Writer()
    preparer = Preparer(writer)
    for _ in range(3):
        preparer.request(1)
        assert isinstance(take(preparer), DiskError)
    preparer.close()
    assert len(writer.threads) == 3
    assert len(set(writer.threads)) == 1


def test_the_first_background_sync_starts_no_thread():
    """The same holds for the first record of class `disk`."""
    writer = Writer()
    flusher = Flusher(writer)
    there = {thread.native_id for thread in threading.enumerate()}
    flusher.request(Flush(1, 2))
    assert take(flusher) == Flushed(1, 2)
    flusher.close()
    assert set(writer.threads) <= there
