"""Recovery: unsynced records are copied, crashes converge, seqs stay reserved, shard counts change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from ringlog.actors.wal_shard import events as ev
from ringlog.actors.wal_shard.recovery.recovery import Recovery
from ringlog.actors.wal_shard.recovery.recovery_result import RecoveryResult, clean_up
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError
from ringlog.limits import HEAD_RESERVATION_MIN
from ringlog.placement import home_shard, shard_of
from ringlog.storage.layout import unpack_file
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, Monitor, PowerLossDamage, SimulatedDisk
from ringlog.topic.reservation import Reservation
from tests.support.disk_files import overwrite
from tests.support.shard_world import DATA, World, refusals
from tests.support.shard_worlds import restart, started


def dump(world: World) -> dict[str, Any]:
    """Return everything that a client can observe, with the shard of each topic."""
    found = {}
    for shard, run in world.runs.items():
        for topic in run.core.directory.by_id.values():
            found[topic.name] = (
                shard, topic.topic_id, topic.epoch, topic.head_seq, topic.earliest_seq, topic.count,
                topic.bytes, topic.last_ts, list(topic.lost), topic.config, world.records(topic.name),
            )  # fmt: skip
    return found


def filled(disk: Any = None, **options: Any) -> World:
    """Return a world with topics of several classes, and with some unsynced or unmarked appends."""
    world = World(disk or SimulatedDisk(DATA), **options)
    world.start()
    for name, durability in (("f", "fsync"), ("d", "disk"), ("gone", "disk"), ("m", "memory")):
        world.put_topic(name, durability=durability)
    for i in range(4):
        world.append("f", [b"f%d" % i, b"g%d" % i])
        world.append("d", [b"d%d" % i * 100])
        world.append("gone", [b"x"])
        world.append("m", [b"m%d" % i])
    world.request(m.TopicDelete("gone"))
    world.put_topic("f", "merge", ttl_ms=77)
    for i in range(3):
        world.append("d", [b"late%d" % i])
    return world


# -- copying forward ---------------------------------------------------------------------------------------


def test_records_that_exist_only_in_the_page_cache_are_copied_before_they_are_shown():
    """A sync fails, the successor reads the cache, and then the power fails (RF-42)."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"f": "fsync"}, disk=disk)
    world.append("f", [b"acked"])
    disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 1, "EIO")]
    frame = world.frame_for("f", [b"in the cache alone"])
    with pytest.raises(DiskError):
        world.send("f", [bytearray(frame)])
    disk.plan = []
    restart(world)
    shown = world.records("f")
    assert [payload for _, payload in shown] == [b"acked", b"in the cache alone"]
    entry = world.send("f", [frame])[0]
    assert refusals([entry]) == [None], "it is a repeat now, and may be acked"
    world.power_loss(0, PowerLossDamage.LOST)
    world.start()
    assert world.records("f") == shown


def test_without_the_copy_the_simulated_disk_loses_the_records():
    """The test above relies on this: the disk drops the data of a failed sync."""
    disk = SimulatedDisk(DATA)
    world = started({"f": "fsync"}, disk=disk)
    run = world.runs[0]
    event = run.frames(1, world.frame_for("f", [b"x"]))
    effects = run.core.handle([run._tick(), event])
    assert isinstance(effects[0], ev.WriteBatch)
    run.writer.append(effects[0].buffers, effects[0].offset, effects[0].length)
    disk.fail_syncs = 1
    with pytest.raises(DiskError):
        run.writer.sync()
    world.kill()
    data = _file(disk)
    assert b"x" + bytes(7) in data[effects[0].offset :]
    disk.power_loss(0, PowerLossDamage.KEPT)
    assert _file(disk)[effects[0].offset :].strip(b"\0") == b""


def _file(disk: Any, name: str = "wal-1-0.log") -> bytes:
    fd = disk.open_read(f"{DATA}/wal/shard-00/{name}")
    try:
        return bytes(disk.read_at(fd, disk.size(fd), 0))
    finally:
        disk.close(fd)


def test_a_successor_never_writes_into_files_of_its_predecessor():
    """Only the creating incarnation writes a file (D3). A monitor observes every incarnation."""
    monitor, inner = Monitor(), SimulatedDisk(DATA)
    world = World(inner, disk_of=lambda incarnation: monitor.watch(inner, incarnation))  # type: ignore[arg-type,return-value]
    for end in ("kill", "stop", "power", "kill"):
        world.start()
        if not world.runs[0].core.directory.find("f"):
            world.put_topic("f", durability="fsync")
        for i in range(4):
            world.append("f", [b"%d" % i * 40_000])
        {"kill": world.kill, "stop": world.stop, "power": lambda: world.power_loss(1)}[end]()
    world.start()
    assert len(world.records("f")) == 16


def test_every_fsync_ack_is_covered_by_a_sync_of_a_file_with_a_durable_name():
    """The monitor is queried at every settlement."""
    monitor, inner = Monitor(), SimulatedDisk(DATA)
    checked = []

    def watch(shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            run = world.runs[shard]
            monitor.require_durable(run.writer.path, run.writer.offset)
            checked.append(effect)

    world = World(inner, disk_of=lambda incarnation: monitor.watch(inner, incarnation), effect_observer=watch)  # type: ignore[arg-type,return-value]
    world.start()
    world.put_topic("f", durability="fsync")
    for i in range(8):
        world.append("f", [b"%d" % i * 30_000])
    assert len(checked) == 8


# -- convergence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_repeated_recovery_changes_nothing(shards):
    """This holds after a kill, an orderly stop and a power loss."""
    for end in (World.kill, World.stop, lambda world: world.power_loss(4)):
        world = filled(shards=shards)
        end(world)
        world.start()
        first = dump(world)
        assert first["f"][-1], "there is something to compare"
        for again in (World.kill, World.stop, lambda world: world.power_loss(5), World.kill):
            again(world)
            world.start()
            assert dump(world) == first


def test_a_crash_at_every_disk_call_of_recovery_converges():
    """The crash is a kill or a power loss."""
    world = filled()
    world.kill()
    base = world.disk.copy()  # type: ignore[attr-defined]
    counting = FaultyDisk(base.copy())
    _continued(world, counting).start()
    expected: dict[str, Any] = {}
    calls = counting.calls["any"]
    assert calls > 8
    for at in range(1, calls + 1):
        for loses_power in (False, True):
            disk = FaultyDisk(base.copy(), DiskFault("any", at, "halt"))
            again = _continued(world, disk)
            with pytest.raises(Halted):
                again.start()
            disk.plan, disk.halted = [], False
            if loses_power:
                again.power_loss(at)
            else:
                again.kill()
            again.start()
            found = {name: facts[-1] for name, facts in dump(again).items()}
            if not loses_power:
                assert found == expected.setdefault("records", found), f"kill at call {at}"
                assert not again.topic("d").lost
            assert found["f"] == expected["records"]["f"], f"call {at}, power loss {loses_power}"


def _continued(world: World, disk: Any) -> World:
    return World(disk, incarnation=world.incarnation, boot_id=world.boot_id, _salt=world._salt)


@pytest.mark.parametrize("crashes", [1, 2, 5, 20])
def test_many_crashes_in_recovery_lose_and_duplicate_nothing(crashes):
    """The copied data does not grow with each crash, and the index stays in order."""
    world = filled(FaultyDisk(SimulatedDisk(DATA)))
    disk: Any = world.disk
    expected = {name: facts[-1] for name, facts in dump(world).items()}
    world.kill()
    sizes = []
    for n in range(crashes):
        disk.plan = [DiskFault("any", disk.calls["any"] + 7 + n % 9, "halt")]
        with contextlib.suppress(Halted):
            world.start()
            sizes.append(world.runs[0].core.log.offset)
        disk.plan, disk.halted = [], False
        world.kill()
    world.start()
    sizes.append(world.runs[0].core.log.offset)
    assert {name: facts[-1] for name, facts in dump(world).items()} == expected
    assert max(sizes) < 16_000, "copies of copies would have doubled each time"
    for run in world.runs.values():
        for topic in run.core.directory.by_id.values():
            seqs = list(topic.index._words[::3])
            assert seqs == sorted(seqs)
    used = [name for name in disk.list_dir(f"{DATA}/wal/shard-00") if _file(disk, name)[4_096:].strip(b"\0")]
    assert len(used) <= 3 + crashes


def test_an_incarnation_that_never_served_is_skipped_and_its_space_is_freed():
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = filled(disk)
    world.kill()
    disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 2, "halt")]
    with pytest.raises(Halted):
        world.start()
    disk.plan, disk.halted = [], False
    world.kill()
    assert _file(disk, "wal-2-0.log")[4_096:].strip(b"\0"), "the incarnation must have started to copy"
    world.start()
    assert len(_file(disk, "wal-2-0.log")) == 4_096
    assert len(world.records("d")) == 7


def test_a_disk_error_while_space_is_freed_fails_the_start_and_the_next_start_converges():
    """The errors are injected into `size` and `full_sync` calls."""
    for fault in (DiskFault("size", 0, "EIO"), DiskFault("full_sync", 0, "EIO")):
        disk = FaultyDisk(SimulatedDisk(DATA))
        world = filled(disk)
        expected = world.records("f")
        world.kill()
        counting = FaultyDisk(disk.inner.copy())  # type: ignore[attr-defined]
        _continued(world, counting).start()
        # The last such call is for the next file, and its creation may fail.
        disk.plan = [DiskFault(fault.op, disk.calls[fault.op] + counting.calls[fault.op] - 1, "EIO")]
        with pytest.raises(DiskError):
            world.start()
        disk.plan = []
        restart(world)
        assert world.records("f") == expected


def test_every_disk_error_leaves_a_directory_that_recovers():
    """Each mutating call fails once (RF-37). All acked records exist, and at most one other."""
    probe = FaultyDisk(SimulatedDisk(DATA))
    filled(probe)
    for op in ("write", "data_sync", "full_sync", "dir_sync", "size", "make_dir"):
        for nth in range(1, probe.calls[op] + 1):  # type: ignore[index]
            for kind in ("EIO", "ENOSPC", *(("short", "EAGAIN") if op == "write" else ())):
                _live_through(DiskFault(op, nth, kind))  # type: ignore[arg-type]


def _live_through(fault: DiskFault) -> None:
    disk = FaultyDisk(SimulatedDisk(DATA), fault)
    world = World(disk)
    acked: list[bytes] = []
    try:
        world.start()
        world.put_topic("f", durability="fsync")
        for i in range(6):
            payload = b"%d" % i * 30_000
            if refusals(world.send("f", [world.frame_for("f", [payload])])) == [None]:
                acked.append(payload)
    except DiskError:
        assert fault.kind in {"EIO", "ENOSPC"}, "short writes and EAGAIN must be retried"
    disk.plan = []
    world.power_loss(fault.nth)
    world.start()
    topic = world.runs[0].core.directory.find("f")
    found = [payload for _, payload in world.records("f")] if topic else []
    assert found[: len(acked)] == acked, fault
    assert len(found) <= len(acked) + 1, fault


# -- seqs and reservations ---------------------------------------------------------------------------------


def test_a_power_loss_skips_the_reserved_seqs_and_reports_them():
    """40 records are acked, and a power loss keeps 33. Seqs 34 to 257 are reported as lost."""
    world = started({"d": "disk"})
    stops = []
    for i in range(40):
        world.append("d", [b"%d" % (i + 1)])
        stops.append(world.runs[0].core.log.offset)
    assert world.topic("d").reservation.reserved == 257
    kept = _file(world.disk)[: stops[32]]
    world.kill()
    world.disk.power_loss(0, PowerLossDamage.LOST)  # type: ignore[attr-defined]
    _write_over(world.disk, kept)
    world.reboot()
    for _ in range(3):
        world.start()
        assert world.topic("d").lost == [(34, 257)]
        assert [seq for seq, _ in world.records("d")] == list(range(1, 34))
        world.kill()
    world.start()
    assert world.append("d", [b"new"], producer=2) == 258
    assert [seq for seq, _ in world.records("d")] == [*range(1, 34), 258]
    world.power_loss(1)
    world.start()
    assert (34, 257) in world.topic("d").lost, "the loss and later appends must survive"
    assert world.records("d")[-1] == (258, b"new")


def _write_over(disk: Any, data: bytes) -> None:
    path = f"{DATA}/wal/shard-00/wal-1-0.log"
    size = len(_file(disk))
    overwrite(disk, path, data.ljust(size, b"\0"))


@pytest.mark.parametrize("end", ["kill", "shard", "stop", "stop and reboot"])
def test_a_kill_or_an_orderly_stop_skips_no_seqs(end):
    """This holds also long after an earlier boot."""
    world = started({"d": "disk"})
    head = 0
    for life in range(4):
        for _ in range(5):
            head += 1
            assert world.append("d", [b"x"], producer=10 + life) == head
        if end == "shard":
            world.kill_shard(0)
            world.start_shard(0)
        else:
            (world.kill if end == "kill" else world.stop)()
            if "reboot" in end:
                world.reboot()
            world.start()
        assert world.topic("d").lost == []
        assert len(world.records("d")) == head


def test_an_orderly_stop_on_another_boot_does_not_turn_a_kill_into_a_loss():
    """Only the last end of the log counts."""
    world = started({"d": "disk"})
    world.append("d", [b"a"])
    world.stop()
    world.reboot()
    world.start()
    world.append("d", [b"b"])
    restart(world)
    assert world.topic("d").lost == []
    assert world.append("d", [b"c"], producer=2) == 3


def test_a_page_cache_dropped_after_a_failed_sync_causes_no_reuse_of_seqs():
    """The kernel keeps running, but the acked tail is lost. The board contains the published position."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = started({"d": "disk"}, disk=disk)
    world.append("d", [b"durable"])
    for i in range(4):
        world.append("d", [b"%d" % i])
    disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 1, "EIO")]
    world.tick(0.2)
    with pytest.raises(DiskError):
        world.tick(0.2)
    disk.plan = []
    marks = world.marks
    world.kill()
    disk.inner.drop_caches()  # type: ignore[attr-defined]
    world.marks = marks
    world.start_shard(0)
    topic = world.topic("d")
    assert topic.lost == [(2, 257)]
    assert world.append("d", [b"new"], producer=2) == 258


def test_reservations_grow_with_the_log_and_always_cover_acked_seqs():
    """Every settlement is checked, for single frames and for large ones."""
    world = World(SimulatedDisk(DATA), file_bytes=4 << 20)
    durable: list[int] = [0]
    pending: list[int] = []

    def watch(shard: int, effect: Any) -> None:
        run = world.runs.get(shard)
        topic = run.core.directory.find("d") if run else None
        if topic is None:
            return
        if isinstance(effect, ev.WriteBatch):
            pending.append(topic.reservation.reserved)
        elif isinstance(effect, ev.Sync):
            durable[0] = pending[-1]
        elif isinstance(effect, ev.Settle):
            last = int(effect.entries[-1][1]) + (int(effect.entries[-1][3]) & 0xFFFFFFFF) - 1
            assert last < durable[0], f"{last} is acked under a durable reservation of {durable[0]}"

    world.effect_observer = watch
    world.start()
    world.put_topic("d", durability="disk")
    syncs = 0
    for i in range(400):
        before = durable[0]
        world.append("d", [b"x"] * (1 if i % 7 else 900))
        syncs += durable[0] != before
        world.clock.advance(0.0005 if i < 300 else 0.5)
    assert 2 < syncs < 110


def test_the_reservation_step_grows_only_while_it_is_used_up_quickly():
    reservation = Reservation()
    first = reservation.extend(1, 0, 100_000)
    assert first == 1 + HEAD_RESERVATION_MIN
    quick = [reservation.extend(reservation.reserved, 1_000 * (i + 1), 100_000) for i in range(5)]
    steps = [b - a for a, b in zip([first, *quick], quick, strict=False)]
    assert steps == sorted(steps)
    assert steps[-1] > HEAD_RESERVATION_MIN * 64
    slow = reservation.reserved
    assert reservation.extend(slow, 10_000_000, 100_000) == slow + HEAD_RESERVATION_MIN


# -- other shard counts ------------------------------------------------------------------------------------

NAMES = [f"topic-{i}" for i in range(12)]


def _write_all(world: World, tag: bytes) -> None:
    for name in NAMES:
        if world.run_of(name).core.directory.find(name) is None:
            world.put_topic(name, durability="fsync")
        world.append(name, [name.encode() + tag])


@pytest.mark.parametrize("counts", [(1, 3, 4, 2, 1), (4, 1, 8, 3, 8), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("end", ["kill", "stop", "power"])
def test_everything_exists_under_every_shard_count(counts, end):
    """The number of shards changes at each restart (RF-67)."""
    world = World(SimulatedDisk(DATA), shards=counts[0])
    expected: list[bytes] = []
    epochs: dict[str, int] = {}
    for life, count in enumerate(counts):
        world.start(count)
        assert len(world.runs) == count
        tag = b" %d" % life
        _write_all(world, tag)
        expected.append(tag)
        for name in NAMES:
            assert [p for _, p in world.records(name)] == [name.encode() + each for each in expected]
            epoch = world.topic(name).epoch
            assert epochs.setdefault(name, epoch) == epoch
        owners = [run.shard for run in world.runs.values() for _ in run.core.directory.by_id]
        assert len(owners) == len(NAMES)
        {"kill": world.kill, "stop": world.stop, "power": lambda: world.power_loss(7)}[end]()


def test_a_crash_between_the_recoveries_of_two_shards_loses_no_tail():
    """One shard has copied its part of an old file, and another shard has not. Then the number of shards
    changes again. Each shard reports only its own topics."""
    for stops in ((3, 4), (3, 3), (3, 1), (3, 2), (4, 3, 4)):
        disk = FaultyDisk(SimulatedDisk(DATA))
        world = started(disk=disk, shards=1)
        _write_all(world, b"")
        world.kill()
        for count in stops:
            for loses_power in (False, True):
                at = disk.calls["any"] + 25
                disk.plan = [DiskFault("any", at, "halt")]
                with contextlib.suppress(Halted):
                    world.start(count)
                disk.plan, disk.halted = [], False
                if loses_power:
                    world.power_loss(count)
                else:
                    world.kill()
        world.start()
        for name in NAMES:
            assert [payload for _, payload in world.records(name)] == [name.encode()], (stops, name)


def test_a_topic_has_one_owner_after_a_change_of_the_shard_count():
    """Its home shard points to it. It can be deleted and created again there, and never exists twice."""
    world = started(shards=1)
    _write_all(world, b"")
    world.kill()
    epochs = dict.fromkeys(NAMES, 0)
    for count in (3, 4, 2, 3, 1):
        world.start(count)
        moved = [
            name for name in NAMES if shard_of(world.topic(name).topic_id, count) != home_shard(name, count)
        ]
        assert moved or count == 1
        for name in NAMES:
            topic = world.topic(name)
            assert topic.epoch > epochs[name] or topic.epoch == epochs[name]
            epochs[name] = topic.epoch
        for name in NAMES[::2]:
            assert world.request(m.TopicDelete(name)).deleted
            again = world.put_topic(name, durability="fsync")
            assert again.created
            assert again.epoch > epochs[name]
            epochs[name] = again.epoch
            world.append(name, [b"again"])
        for end in (world.kill, world.stop):
            end()
            world.start()
            live = [topic.name for run in world.runs.values() for topic in run.core.directory.by_id.values()]
            assert sorted(live) == sorted(NAMES)
            for name in NAMES[::2]:
                assert world.topic(name).epoch == epochs[name]
                assert world.records(name) == [(1, b"again")]
        world.kill()


def test_a_deleted_topic_stays_deleted_under_every_later_count():
    """Half of the topics are deleted under three shards."""
    world = started(shards=3)
    _write_all(world, b"")
    for name in NAMES[:6]:
        world.request(m.TopicDelete(name))
    for count in (1, 4, 2, 3):
        world.kill()
        world.start(count)
        live = {topic.name for run in world.runs.values() for topic in run.core.directory.by_id.values()}
        assert live == set(NAMES[6:])


def test_the_appends_of_a_topic_are_in_the_log_of_one_shard():
    """The topic ids of a shard hash to this shard."""
    world = started(shards=3)
    _write_all(world, b"")
    for shard, run in world.runs.items():
        for topic in run.core.directory.by_id.values():
            assert shard_of(topic.topic_id, 3) == shard
            located = world.request(m.Locate(topic.name, 0))
            assert {extent.path.split("/")[1] for extent in located.extents} == {f"shard-{shard:02d}"}


# -- evidence from the predecessor -------------------------------------------------------------------------


def test_a_file_header_contains_exactly_the_durable_end_of_its_predecessor():
    """A later recovery uses it as evidence."""
    world = filled()
    durable = world.runs[0].core.log.marked_durable
    restart(world)
    found: Callable[[str], bytes] = lambda name: _file(world.disk, name)  # noqa: E731
    from ringlog.storage.layout import decode_wal_header

    header = decode_wal_header(found("wal-2-0.log")[:4_096], "")
    assert unpack_file(header.prev_file) == (1, 0)
    assert header.prev_stop == durable


def test_damage_refuses_the_start_with_file_and_offset():
    """The offset is not behind the damaged byte."""
    world = filled()
    world.tick(0.2)
    world.tick(0.2)
    world.kill()
    data = bytearray(_file(world.disk))
    data[5_000] ^= 4
    _write_over(world.disk, bytes(data))
    with pytest.raises(CorruptData) as refused:
        world.start()
    assert refused.value.detail["file"] == "wal/shard-00/wal-1-0.log"
    assert 4_096 <= refused.value.detail["offset"] <= 5_000


def test_recovery_sends_heartbeats_within_a_file(monkeypatch):
    """The supervisor judges recovery by its heartbeats, and a large file may take long."""
    monkeypatch.setattr("ringlog.storage.recovery.RECOVERY_READ_BYTES", 4096)
    world = started({"f": "fsync"}, file_bytes=256 << 10)
    for _ in range(40):
        world.append("f", [bytes(2_000)])
    world.kill_shard(0)
    beats = []
    beat = Recovery._beat
    monkeypatch.setattr(Recovery, "_beat", lambda self: (beats.append(1), beat(self)))
    world.start_shard(0)
    assert len(beats) > 20
    assert len(world.records("f")) == 40


@pytest.mark.parametrize("middle", [1, 3])
@pytest.mark.parametrize("kill_one", [False, True])
def test_an_orderly_end_that_was_never_durable_is_stated_by_shards_of_another_count(
    middle: int, kill_one: bool
) -> None:
    """The last sync of a stop fails, and shards of another count go on.

    After a power loss the orderly mark is gone. Its stream must not be taken for unfinished: others have
    continued its topics."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = World(disk, shards=2)
    world.start()
    names = [f"t{i}" for i in range(8)]
    for name in names:
        world.put_topic(name, durability="fsync")
        for i in range(3):
            world.append(name, [b"%d" % i])
    for run in list(world.runs.values()):
        disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 1, "EIO")]
        with pytest.raises(DiskError):
            run.drain()
    disk.plan = []
    world.kill()
    world.start(middle)
    if kill_one:
        world.kill_shard(0)
        world.start_shard(0)
    for _ in range(2):
        for name in names:
            world.append(name, [b"later"], producer=2)
    expected = {name: world.records(name) for name in names}
    assert {len(records) for records in expected.values()} == {5}
    world.power_loss(1, PowerLossDamage.LOST)
    for count in (2, 2, middle, middle, 2):
        world.start(count)
        assert {name: world.records(name) for name in names} == expected
        assert [name for name in names if world.topic(name).lost] == []
        world.kill()


@pytest.mark.parametrize("middle", [1, 3])
def test_reserved_seqs_of_an_orderly_end_are_not_lost_under_another_count(middle: int) -> None:
    """A shard of another count states the end of the stream.

    A later crash of the host loses none of its seqs, although the orderly mark is behind that end."""
    world = World(SimulatedDisk(DATA), shards=2)
    world.start()
    names = [f"t{i}" for i in range(6)]
    for name in names:
        world.put_topic(name, durability="disk")
        world.append(name, [b"x"])
    world.stop()
    world.start(middle)
    world.put_topic("last", durability="fsync")
    world.append("last", [b"synced"])
    for count in (middle, 2, middle):
        world.power_loss(1, PowerLossDamage.KEPT)
        world.start(count)
        assert {name: world.topic(name).lost for name in names} == {name: [] for name in names}
        assert {len(world.records(name)) for name in names} == {1}


def test_an_orderly_end_that_was_never_durable_loses_no_reserved_seqs() -> None:
    """The next incarnation states it in the header of its first file."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = World(disk)
    world.start()
    world.put_topic("d", durability="disk")
    world.put_topic("f", durability="fsync")
    world.append("d", [b"x"])

    def fail_next_sync(shard: int, effect: object) -> None:
        if isinstance(effect, ev.WriteBatch):
            disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 1, "EIO")]

    world.effect_observer = fail_next_sync
    with pytest.raises(DiskError):
        world.runs[0].drain()
    world.effect_observer = lambda shard, effect: None
    disk.plan = []
    world.kill()
    for life in range(3):
        world.start()
        world.append("f", [b"x"], producer=10 + life)
        assert world.topic("d").lost == []
        assert len(world.records("d")) == 1
        world.power_loss(1, PowerLossDamage.LOST)


def test_an_unused_file_that_the_compactor_has_just_deleted_is_no_error(world):
    """The compactor deletes what its last checkpoint released, also after the death of the shard."""
    world.put_topic("t", durability="fsync")
    disk = FaultyDisk(world.disk)
    found = RecoveryResult(unused_files=["wal/shard-00/wal-9-9.log"])
    clean_up(disk, DATA, found)
    disk.plan = [DiskFault("unlink", disk.calls["unlink"] + 1, "EIO")]
    with pytest.raises(DiskError):
        clean_up(disk, DATA, found)
