"""Who may attach to what: identity, ownership, one producer, restarts, forks, leftovers."""

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
from ring_children import Child, until
from ring_frames import frame_of, number_of, push_all, settle, take

from ringlog.errors import RingError
from ringlog.ring import atomic_words, layout
from ringlog.ring.region import create_ring, producer_alive, producer_closed, remove_ring
from ringlog.ring.ring import RingConsumer, RingProducer

MakeRing = Callable[..., str]
BOTH = pytest.mark.parametrize(
    "attach", [RingProducer.attach, RingConsumer.attach], ids=["producer", "consumer"]
)


def test_a_ring_is_made_private_whole_and_once(make_ring: MakeRing) -> None:
    """SEC-22, RD-11: 0600, all blocks allocated, never over an existing file."""
    path = make_ring(ring_bytes=65_537)
    facts = os.stat(path)
    assert (facts.st_mode & 0o7777, facts.st_nlink) == (0o600, 1)
    assert facts.st_size == 4096 + 65_536 + 4096 + 65 * 64
    assert facts.st_blocks * 512 >= facts.st_size
    with pytest.raises(RingError, match="taken"):
        make_ring()
    assert os.listdir(os.path.dirname(path)) == ["ring"]


def shared_kib() -> int:
    """Shared memory that is mapped into this process and there."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0])


@BOTH
def test_attaching_brings_no_more_than_the_words_into_memory(make_ring: MakeRing, attach: Callable) -> None:
    """A shard commits for nobody while it attaches: what a whole ring takes is not to be paid at once."""
    path = make_ring(ring_bytes=16 << 20)
    before = shared_kib()
    end = attach(path)
    assert shared_kib() - before < 1_024
    end.detach() if isinstance(end, RingConsumer) else end.close()


@pytest.mark.parametrize("changes", [{"ring_bytes": 4096}, {"ring_bytes": 1 << 31}, {"settle_entries": 0}])
def test_sizes_out_of_bounds_are_refused_with_the_limit(make_ring: MakeRing, changes: dict) -> None:
    with pytest.raises(RingError, match=r"out of bounds.*min=.*max="):
        make_ring(**changes)


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """This process can open so many files more."""
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    used = {
        number for number in listed if Path(f"/proc/self/fd/{number}").is_symlink()
    }  # Not the listing's own.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = list(itertools.islice((n for n in itertools.count() if n not in used), count + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@BOTH
def test_want_of_descriptors_is_a_typed_error_wherever_it_strikes(
    make_ring: MakeRing, attach: Callable
) -> None:
    """RF-19: opening takes one, mapping another; who attaches must not die of an OSError."""
    path = make_ring()
    for count in (0, 1):
        with free_descriptors(count), pytest.raises(RingError) as refused:
            attach(path)
        assert refused.value.detail["errno"] == errno.EMFILE
    with free_descriptors(2):
        assert attach(path)


@BOTH
def test_another_engines_ring_is_refused(make_ring: MakeRing, attach: Callable) -> None:
    """RF-30."""
    with pytest.raises(RingError, match="another engine"):
        attach(make_ring(), engine_id="someone else")


def test_another_shards_ring_is_refused(make_ring: MakeRing) -> None:
    with pytest.raises(RingError, match="another shard"):
        RingConsumer.attach(make_ring(), shard=4)


@BOTH
def test_any_damaged_byte_of_the_identity_is_refused(make_ring: MakeRing, attach: Callable) -> None:
    """RF-30: magic, version, sizes, ids: whatever differs."""
    path = make_ring()
    good = Path(path).read_bytes()[: layout.IDENTITY_BYTES]
    with open(path, "r+b", buffering=0) as file:
        for at in range(layout.IDENTITY_BYTES):
            os.pwrite(file.fileno(), bytes([good[at] ^ 0x10]), at)
            with pytest.raises(RingError, match=r"magic|version|verify"):
                attach(path)
            os.pwrite(file.fileno(), good[at : at + 1], at)
    attach(path)._memory.close()


@BOTH
@pytest.mark.parametrize("change", [-64, 64, -65_536])
def test_a_file_of_another_size_is_refused(make_ring: MakeRing, attach: Callable, change: int) -> None:
    """RF-29, RF-30: a truncated file is never mapped."""
    path = make_ring()
    os.truncate(path, os.stat(path).st_size + change)
    with pytest.raises(RingError, match="wrong size"):
        attach(path)


def test_an_empty_and_an_absent_file_are_refused(shm_dir: Path) -> None:
    with pytest.raises(RingError, match="No such file"):
        RingProducer.attach(str(shm_dir / "absent"))
    (shm_dir / "empty").touch(0o600)
    with pytest.raises(RingError, match="too short"):
        RingProducer.attach(str(shm_dir / "empty"))


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "directory", "mode", "owner"])
@BOTH
def test_what_is_not_a_private_file_of_ours_is_refused(
    make_ring: MakeRing, shm_dir: Path, attach: Callable, kind: str
) -> None:
    """RF-111, SEC-24: and opening it never blocks."""
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
    with pytest.raises(RingError, match=r"symbolic|name|regular|directory|mode|owned"):
        attach(str(target))


def test_a_second_producer_is_refused_and_the_first_goes_on(make_ring: MakeRing) -> None:
    """RF-31."""
    path = make_ring()
    first = RingProducer.attach(path)
    with pytest.raises(RingError, match="producer already"):
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


def test_a_restarted_consumer_reads_again_what_was_not_settled(make_ring: MakeRing) -> None:
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


def test_what_a_restarted_consumer_settles_again_is_recognised_by_position(make_ring: MakeRing) -> None:
    """RF-36: the settle head was stored, the tail was not."""
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


def test_a_killed_producers_frames_are_drained_and_the_ring_removed(make_ring: MakeRing) -> None:
    """RF-9: nobody takes the settlements any more, and that stops nobody."""
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


def test_a_next_producer_goes_on_and_knows_what_is_in_flight(make_ring: MakeRing) -> None:
    """It counts what lies in the ring and what was settled but not taken, not what its predecessor took."""
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


def test_a_forked_child_can_neither_use_the_producer_nor_keep_its_lock(make_ring: MakeRing) -> None:
    """RD-7: a fork must not write into its parent's ring, nor look like a living producer."""
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


def test_another_machine_needs_a_package_or_sockets(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never hope that stores stay in order."""
    monkeypatch.setattr(atomic_words.stores_are_ordered.__globals__["platform"], "machine", lambda: "riscv64")
    monkeypatch.setitem(__import__("sys").modules, "atomicshm", None)
    with pytest.raises(RingError, match=r"use sockets.*riscv64"):
        create_ring(
            str(shm_dir / "r"), ring_bytes=65_536, settle_entries=8, shard=0, engine_id="e", client="c"
        )


def test_on_another_machine_the_package_carries_a_ring(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acquire loads and release stores instead of plain ones; the same protocol."""
    pytest.importorskip("atomicshm", reason="only needed on machines that reorder stores")
    monkeypatch.setattr(atomic_words.stores_are_ordered.__globals__["platform"], "machine", lambda: "aarch64")
    path = make_ring()
    producer, consumer = RingProducer.attach(path), RingConsumer.attach(path)
    push_all(producer, [frame_of(i) for i in range(3)])
    settle(consumer, take(consumer))
    assert len(producer.take_settlements()) == 3
    producer.close()
    consumer.detach()


def test_what_a_dead_consumer_settled_is_not_read_again(make_ring: MakeRing) -> None:
    """It died between its settlements and its tail. A frame that it refused must not be taken by the next
    one: its producer was told, and sends it again under another number.
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


def test_a_last_settlement_that_makes_no_sense_moves_no_tail(make_ring: MakeRing) -> None:
    """The producer can write there: what it says harms its own frames at most."""
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
