"""Attaching to a ring: identity, ownership, one producer, restarts, forks, leftovers."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringlog.errors import RingError
from ringlog.ring import layout, memory
from ringlog.ring.region import create_ring, producer_alive, producer_closed, remove_ring
from ringlog.ring.ring import RingConsumer, RingProducer
from tests.support.ring_children import Child, until
from tests.support.ring_frames import frame_of, number_of, push_all, settle, take

MakeRing = Callable[..., str]
BOTH = pytest.mark.parametrize(
    "attach", [RingProducer.attach, RingConsumer.attach], ids=["producer", "consumer"]
)


def test_a_ring_is_created_private_allocated_and_once(make_ring: MakeRing) -> None:
    """The file has mode 0600 and all its blocks are allocated. An existing file is never overwritten."""
    path = make_ring(ring_bytes=65_537)
    facts = os.stat(path)
    assert (facts.st_mode & 0o7777, facts.st_nlink) == (0o600, 1)
    assert facts.st_size == 4096 + 65_536 + 4096 + 65 * 64
    assert facts.st_blocks * 512 >= facts.st_size
    with pytest.raises(RingError, match="file exists"):
        make_ring()
    assert os.listdir(os.path.dirname(path)) == ["ring"]


def shared_kib() -> int:
    """Return the shared memory in KiB that this process has mapped and resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0])


@BOTH
def test_attaching_maps_only_the_header_words_into_memory(make_ring: MakeRing, attach: Callable) -> None:
    """A shard commits nothing while it attaches, so attaching must not fault in the whole ring."""
    path = make_ring(ring_bytes=16 << 20)
    before = shared_kib()
    end = attach(path)
    assert shared_kib() - before < 1_024
    end.detach() if isinstance(end, RingConsumer) else end.close()


@pytest.mark.parametrize("changes", [{"ring_bytes": 4096}, {"ring_bytes": 1 << 31}, {"settle_entries": 0}])
def test_sizes_out_of_bounds_are_refused_with_the_limit(make_ring: MakeRing, changes: dict) -> None:
    with pytest.raises(RingError, match=r"must be in .* got .*min=.*max="):
        make_ring(**changes)


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open `count` more files."""
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    used = {
        number for number in listed if Path(f"/proc/self/fd/{number}").is_symlink()
    }  # Without the descriptor of the listing itself.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = list(itertools.islice((n for n in itertools.count() if n not in used), count + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@BOTH
def test_a_lack_of_descriptors_is_a_typed_error_at_each_step(make_ring: MakeRing, attach: Callable) -> None:
    """Opening needs one descriptor and mapping another. A process that attaches must not fail with OSError
    (RF-19)."""
    path = make_ring()
    for count in (0, 1):
        with free_descriptors(count), pytest.raises(RingError) as refused:
            attach(path)
        assert refused.value.detail["errno"] == errno.EMFILE
    with free_descriptors(2):
        assert attach(path)


@BOTH
def test_another_engines_ring_is_refused(make_ring: MakeRing, attach: Callable) -> None:
    """The engine id in the ring's identity must match (RF-30)."""
    with pytest.raises(RingError, match="another engine"):
        attach(make_ring(), engine_id="someone else")


def test_another_shards_ring_is_refused(make_ring: MakeRing) -> None:
    with pytest.raises(RingError, match="another shard"):
        RingConsumer.attach(make_ring(), shard=4)


@BOTH
def test_any_damaged_byte_of_the_identity_is_refused(make_ring: MakeRing, attach: Callable) -> None:
    """Magic, version, sizes, ids: every changed byte is detected (RF-30)."""
    path = make_ring()
    good = Path(path).read_bytes()[: layout.IDENTITY_BYTES]
    with open(path, "r+b", buffering=0) as file:
        for at in range(layout.IDENTITY_BYTES):
            os.pwrite(file.fileno(), bytes([good[at] ^ 0x10]), at)
            with pytest.raises(RingError, match=r"magic|version|checksum"):
                attach(path)
            os.pwrite(file.fileno(), good[at : at + 1], at)
    attach(path)._memory.close()


@BOTH
@pytest.mark.parametrize("change", [-64, 64, -65_536])
def test_a_file_of_another_size_is_refused(make_ring: MakeRing, attach: Callable, change: int) -> None:
    """A truncated file is never mapped (RF-29, RF-30)."""
    path = make_ring()
    os.truncate(path, os.stat(path).st_size + change)
    with pytest.raises(RingError, match="wrong size"):
        attach(path)


def test_an_empty_and_an_absent_file_are_refused(shm_dir: Path) -> None:
    with pytest.raises(RingError, match="No such file"):
        RingProducer.attach(str(shm_dir / "absent"))
    (shm_dir / "empty").touch(0o600)
    with pytest.raises(RingError, match="must have at least"):
        RingProducer.attach(str(shm_dir / "empty"))


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "directory", "mode", "owner"])
@BOTH
def test_a_path_that_is_not_a_private_ring_file_is_refused(
    make_ring: MakeRing, shm_dir: Path, attach: Callable, kind: str
) -> None:
    """Opening such a path never blocks (RF-111)."""
    path, target = make_ring(), shm_dir / "other"
    if kind == "symlink":
        target.symlink_to(path)
    elif kind == "hard link":
        target.hardlink_to(path)
    elif kind == "pipe":
        os.mkfifo(target, 0o600)
    elif kind == "directory":
        target.mkdir(mode=0o700)
    elif kind == "mode":
        os.rename(path, target)
        target.chmod(0o640)
    else:
        if os.geteuid() != 0:
            pytest.skip("changing an owner needs root")
        os.rename(path, target)
        os.chown(target, 12_345, -1)
    with pytest.raises(RingError, match=r"symbolic|link|regular|directory|mode|owned"):
        attach(str(target))


def test_a_second_producer_is_refused_and_the_first_continues(make_ring: MakeRing) -> None:
    """A ring has at most one producer (R5, RF-31)."""
    path = make_ring()
    first = RingProducer.attach(path)
    with pytest.raises(RingError, match="already has a producer"):
        RingProducer.attach(path)
    assert producer_alive(path)
    assert first.push_one(frame_of(1)) == 0
    first.close()
    assert not producer_alive(path)


def test_a_close_is_final_for_either_side(make_ring: MakeRing) -> None:
    path = make_ring()
    producer, consumer = RingProducer.attach(path), RingConsumer.attach(path)
    consumer.close()
    consumer.detach()
    with pytest.raises(RingError, match="closed by its consumer"):
        RingConsumer.attach(path)
    producer.close()
    with pytest.raises(RingError, match="closed by its producer"):
        RingProducer.attach(path)


def test_a_restarted_consumer_rereads_unsettled_frames(make_ring: MakeRing) -> None:
    path = make_ring()
    producer, consumer = RingProducer.attach(path), RingConsumer.attach(path)
    push_all(producer, [frame_of(i) for i in range(5)])
    frames = take(consumer)
    settle(consumer, frames[:2])
    consumer.detach()
    consumer = RingConsumer.attach(path)
    assert consumer.read_position == consumer.tail == 128
    again = take(consumer)
    assert again == frames[2:]
    settle(consumer, again)
    assert producer.take_settlements()[:, 0].tolist() == [position for position, _ in frames]
    producer.close()
    consumer.detach()


def test_a_producer_recognises_repeated_settlements_by_position(make_ring: MakeRing) -> None:
    """The consumer stored the settle head and died before it stored the tail (RF-36)."""
    path = make_ring()
    producer, consumer = RingProducer.attach(path), RingConsumer.attach(path)
    push_all(producer, [frame_of(i) for i in range(3)])
    settle(consumer, take(consumer)[:2])
    consumer._memory.store(layout.RingWord.TAIL, 0)
    consumer.detach()
    consumer = RingConsumer.attach(path)
    settle(consumer, take(consumer))
    assert producer.take_settlements()[:, 0].tolist() == [0, 64, 128]
    assert producer.in_flight == 0
    producer.close()
    consumer.detach()


@pytest.mark.slow
def test_a_killed_producers_frames_are_drained_and_the_ring_removed(make_ring: MakeRing) -> None:
    """No process takes the settlements any more, and the consumer does not block (RF-9)."""
    path = make_ring()
    ready, say = os.pipe()

    def produce() -> None:
        producer = RingProducer.attach(path)
        assert producer.push_run(frame_of(9) * 60, 64)[0] == 60
        producer._memory.write(60 * 64, frame_of(10))
        os.write(say, b"x")
        signal.pause()

    child = Child(produce)
    assert os.read(ready, 1) == b"x"
    assert producer_alive(path)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert not producer_alive(path)
    consumer = RingConsumer.attach(path)
    frames = take(consumer)
    assert [number_of(frame) for _, frame in frames] == [9] * 60, "an unpublished frame never happened"
    settle(consumer, frames[:50])
    position, last = frames[-1]
    consumer.settle(consumer_nothing(), position + len(last))
    assert (consumer.pending, consumer.tail) == (0, 60 * 64)
    consumer.close()
    consumer.detach()
    remove_ring(path)
    remove_ring(path)
    assert not os.path.exists(path)
    for end in (ready, say):
        os.close(end)


def consumer_nothing():
    import numpy as np

    return np.empty((0, 8), dtype=np.uint64)


@pytest.mark.slow
def test_a_next_producer_counts_the_frames_in_flight(make_ring: MakeRing) -> None:
    """It counts the frames in the ring and the settlements that no producer took yet.

    It does not count the settlements that its predecessor took.
    """
    path = make_ring()
    consumer = RingConsumer.attach(path)

    def produce() -> None:
        producer = RingProducer.attach(path)
        push_all(producer, [frame_of(i) for i in range(10)])
        frames = take(consumer)
        settle(consumer, frames[:4])
        assert len(producer.take_settlements()) == 4
        settle(consumer, frames[4:6])
        os._exit(0)

    assert Child(produce).wait() == 0
    producer = RingProducer.attach(path)
    assert (producer.head, producer.in_flight) == (640, 6)
    assert producer.take_settlements()[:, 0].tolist() == [256, 320]
    assert producer.in_flight == 4
    assert producer.push_one(frame_of(10)) == 640
    producer.close()
    consumer.detach()


@pytest.mark.slow
def test_a_forked_child_can_neither_use_the_producer_nor_keep_its_lock(make_ring: MakeRing) -> None:
    """A forked process must not write into its parent's ring, and must not appear as a living producer."""
    path = make_ring()
    ready, say = os.pipe()

    def parent() -> None:
        producer = RingProducer.attach(path)
        grandchild = os.fork()
        if grandchild == 0:
            try:
                producer.push_one(frame_of(1))
            except RingError as e:
                os.write(say, b"refused " + str(os.getpid()).encode() if "after a fork" in str(e) else b"?")
            producer.close()
            signal.pause()
        signal.pause()

    child = Child(parent)
    said = os.read(ready, 100).split()
    assert said[0] == b"refused"
    assert producer_alive(path), "the parent lives"
    state = RingConsumer.attach(path)
    assert not producer_closed(path), "the child's close is not the parent's"
    child.kill()
    child.wait()
    until(lambda: not producer_alive(path), "the lock is free although the grandchild lives")
    state.detach()
    grandchild = os.pidfd_open(int(said[1]))
    signal.pidfd_send_signal(grandchild, signal.SIGKILL)
    for end in (ready, say, grandchild):
        os.close(end)


def test_a_weakly_ordered_machine_needs_the_package_or_sockets(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code never assumes that a CPU keeps stores in order."""
    monkeypatch.setattr(memory.stores_are_ordered.__globals__["platform"], "machine", lambda: "riscv64")
    monkeypatch.setitem(__import__("sys").modules, "atomicshm", None)
    with pytest.raises(RingError, match=r"by TCP.*riscv64"):
        create_ring(
            str(shm_dir / "r"), ring_bytes=65_536, settle_entries=8, shard=0, engine_id="e", client="c"
        )


def test_a_ring_on_a_weakly_ordered_machine_uses_the_package(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package provides acquire loads and release stores instead of plain ones. The protocol is the
    same."""
    pytest.importorskip("atomicshm", reason="only needed on machines that reorder stores")
    monkeypatch.setattr(memory.stores_are_ordered.__globals__["platform"], "machine", lambda: "aarch64")
    path = make_ring()
    producer, consumer = RingProducer.attach(path), RingConsumer.attach(path)
    push_all(producer, [frame_of(i) for i in range(3)])
    settle(consumer, take(consumer))
    assert len(producer.take_settlements()) == 3
    producer.close()
    consumer.detach()


def test_frames_that_a_dead_consumer_settled_are_not_read_again(make_ring: MakeRing) -> None:
    """The consumer died after it stored its settlements and before it stored its tail.

    Its successor must not accept a frame that the dead consumer refused (R8). The producer received the
    refusal and sends the frame again under another number.
    """
    path = make_ring()
    producer = RingProducer.attach(path)
    positions = push_all(producer, [frame_of(1), frame_of(2), frame_of(3)])
    first = RingConsumer.attach(path)
    taken = take(first)
    tail = first.tail
    settle(first, taken[:2])
    assert len(producer.take_settlements()) == 2
    first._memory.store(layout.RingWord.TAIL, tail)
    first.detach()
    second = RingConsumer.attach(path)
    assert second.tail == positions[2]
    assert [number_of(data) for _, data in take(second)] == [3]
    second.detach()
    producer.close()


def test_an_invalid_last_settlement_does_not_move_the_tail(make_ring: MakeRing) -> None:
    """The producer can write to the settle area, so a wrong value there may harm only its own frames."""
    path = make_ring()
    producer = RingProducer.attach(path)
    push_all(producer, [frame_of(1), frame_of(2)])
    consumer = RingConsumer.attach(path)
    settle(consumer, take(consumer)[:1])
    after, head = consumer.tail, producer.head
    consumer.detach()
    for place in (after - 8, after + 4, head, head + 8, (1 << 64) - 8):
        producer._memory.write_entries(0, place.to_bytes(8, "little"))
        again = RingConsumer.attach(path)
        assert again.tail == after
        again.detach()
    producer.close()
