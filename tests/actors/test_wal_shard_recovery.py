"""Recovery: what is in doubt is copied, crashes inside it converge, reservations, changed shard counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from actors.wal_shard import events as ev
from actors.wal_shard.recovery.recovery import Recovery
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError
from ringlog.limits import HEAD_RESERVATION_MIN
from ringlog.placement import home_shard, shard_of
from ringlog.storage.layout import unpack_file
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, Monitor, PowerLossDamage, SimulatedDisk
from ringlog.testing.shard_world import DATA, World, refusals
from ringlog.topic.reservation import Reservation


def dump(world: World) -> dict[str, Any]:
    """Everything a client can see, and which shard shows it."""
    found = {}
    for shard, run in world.runs.items():
        for topic in run.core.directory.by_id.values():
            found[topic.name] = (
                shard, topic.topic_id, topic.epoch, topic.head_seq, topic.earliest_seq, topic.count,
                topic.bytes, topic.last_ts, list(topic.lost), topic.config, world.records(topic.name),
            )  # fmt: skip
    return found


def filled(disk: Any = None, **options: Any) -> World:
    """A world with some of everything, killed while parts of it are unsynced or unmarked."""
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


# -- copying forward (RD-2) --------------------------------------------------------------------------------


def test_records_that_only_the_page_cache_holds_are_copied_before_they_are_shown():
    """RF-42: a sync fails, the process is replaced, its successor reads the cache; then power goes."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = World(disk)
    world.start()
    world.put_topic("f", durability="fsync")
    world.append("f", [b"acked"])
    disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 1, "EIO")]
    frame = world.frame_for("f", [b"in the cache alone"])
    with pytest.raises(DiskError):
        world.send("f", [bytearray(frame)])
    disk.plan = []
    world.kill()
    world.start()
    shown = world.records("f")
    assert [payload for _, payload in shown] == [b"acked", b"in the cache alone"]
    entry = world.send("f", [frame])[0]
    assert refusals([entry]) == [None], "it is a repeat now, and may be acked"
    world.power_loss(0, PowerLossDamage.LOST)
    world.start()
    assert world.records("f") == shown


def test_the_trap_is_real_without_the_copy_the_records_are_gone():
    """What the test above relies on: the disk forgets what a failed sync should have written."""
    disk = SimulatedDisk(DATA)
    world = World(disk)
    world.start()
    world.put_topic("f", durability="fsync")
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


def test_a_successor_never_writes_into_its_predecessor_s_files():
    """RD-3, FH-4, mutant 8: the monitor watches every incarnation, through drains, kills and cuts."""
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


def test_an_ack_of_class_fsync_is_always_covered_by_a_sync_of_a_file_with_a_durable_name():
    """FX-30: asked of the monitor at every settlement."""
    monitor, inner = Monitor(), SimulatedDisk(DATA)
    checked = []

    def watch(shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            run = world.runs[shard]
            monitor.require_durable(run.writer.path, run.writer.offset)
            checked.append(effect)

    world = World(inner, disk_of=lambda incarnation: monitor.watch(inner, incarnation), watch=watch)  # type: ignore[arg-type,return-value]
    world.start()
    world.put_topic("f", durability="fsync")
    for i in range(8):
        world.append("f", [b"%d" % i * 30_000])
    assert len(checked) == 8


# -- converging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_recovering_again_and_again_changes_nothing(shards):
    """RE-10, INV-5, FX-111: after a kill and after a power loss."""
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
    """CP-56 to CP-60, FX-106, RE-21: by kill and by power loss."""
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
def test_many_crashes_inside_recovery_lose_and_multiply_nothing(crashes):
    """RD-2: what is copied does not grow with each crash, and the index stays in order."""
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


def test_an_incarnation_that_never_served_is_passed_over_and_its_space_given_back():
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = filled(disk)
    world.kill()
    disk.plan = [DiskFault("data_sync", disk.calls["data_sync"] + 2, "halt")]
    with pytest.raises(Halted):
        world.start()
    disk.plan, disk.halted = [], False
    world.kill()
    assert _file(disk, "wal-2-0.log")[4_096:].strip(b"\0"), "it had begun to copy"
    world.start()
    assert len(_file(disk, "wal-2-0.log")) == 4_096
    assert len(world.records("d")) == 7


def test_an_error_while_giving_space_back_fails_the_start_and_the_next_one_converges():
    """RE-8, FX-108, FX-109."""
    for fault in (DiskFault("size", 0, "EIO"), DiskFault("full_sync", 0, "EIO")):
        disk = FaultyDisk(SimulatedDisk(DATA))
        world = filled(disk)
        expected = world.records("f")
        world.kill()
        counting = FaultyDisk(disk.inner.copy())  # type: ignore[attr-defined]
        _continued(world, counting).start()
        # The last such call is for the next file, whose making may fail.
        disk.plan = [DiskFault(fault.op, disk.calls[fault.op] + counting.calls[fault.op] - 1, "EIO")]
        with pytest.raises(DiskError):
            world.start()
        disk.plan = []
        world.kill()
        world.start()
        assert world.records("f") == expected


def test_every_disk_error_of_a_life_leaves_a_directory_that_recovers():
    """RF-37, FX-119: each mutating call once, EIO, ENOSPC and short writes; acked is there, and no more."""
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
        assert fault.kind in {"EIO", "ENOSPC"}, "short writes and refusals are gone on with (ST-11, ST-12)"
    disk.plan = []
    world.power_loss(fault.nth)
    world.start()
    topic = world.runs[0].core.directory.find("f")
    found = [payload for _, payload in world.records("f")] if topic else []
    assert found[: len(acked)] == acked, fault
    assert len(found) <= len(acked) + 1, fault


# -- numbers (D-9 to D-12, D-19) ---------------------------------------------------------------------------


def test_worked_case_h():
    """TB-17 H: 40 acked, power loss keeps 33, the next gets 258, 34 to 257 are announced."""
    world = World(SimulatedDisk(DATA))
    world.start()
    world.put_topic("d", durability="disk")
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
    assert (34, 257) in world.topic("d").lost, "kept, and appends above the jump survive (D-11, FX-209)"
    assert world.records("d")[-1] == (258, b"new")


def _write_over(disk: Any, data: bytes) -> None:
    path = f"{DATA}/wal/shard-00/wal-1-0.log"
    size = len(_file(disk))
    disk.unlink(path)
    fd = disk.create(path)
    disk.write_at(fd, [data.ljust(size, b"\0")], 0)
    disk.sync_file(fd)
    disk.close(fd)
    disk.sync_dir(f"{DATA}/wal/shard-00")


@pytest.mark.parametrize("end", ["kill", "shard", "stop", "stop and reboot"])
def test_a_kill_or_an_orderly_stop_costs_no_numbers(end):
    """D-19, FX-161, FX-167, CP-8, CP-10: also long after an earlier boot."""
    world = World(SimulatedDisk(DATA))
    world.start()
    world.put_topic("d", durability="disk")
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


def test_an_orderly_life_on_another_boot_does_not_turn_a_kill_into_a_loss():
    """D-19: only the stream's last end matters."""
    world = World(SimulatedDisk(DATA))
    world.start()
    world.put_topic("d", durability="disk")
    world.append("d", [b"a"])
    world.stop()
    world.reboot()
    world.start()
    world.append("d", [b"b"])
    world.kill()
    world.start()
    assert world.topic("d").lost == []
    assert world.append("d", [b"c"], producer=2) == 3


def test_a_cache_that_was_dropped_after_a_failed_sync_reissues_no_number():
    """D-9, S-11: the kernel stayed up, but the acked tail is gone; the board knows how far it went."""
    disk = FaultyDisk(SimulatedDisk(DATA))
    world = World(disk)
    world.start()
    world.put_topic("d", durability="disk")
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


def test_reservations_grow_with_the_stream_and_never_lag_behind_what_is_acked():
    """D-9, D-10: checked at every settlement, for single frames and for large ones."""
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

    world.watch = watch
    world.start()
    world.put_topic("d", durability="disk")
    syncs = 0
    for i in range(400):
        before = durable[0]
        world.append("d", [b"x"] * (1 if i % 7 else 900))
        syncs += durable[0] != before
        world.clock.advance(0.0005 if i < 300 else 0.5)
    assert 2 < syncs < 110


def test_a_reservation_step_grows_only_while_it_is_used_up_quickly():
    reservation = Reservation()
    first = reservation.extend(1, 0, 100_000)
    assert first == 1 + HEAD_RESERVATION_MIN
    quick = [reservation.extend(reservation.reserved, 1_000 * (i + 1), 100_000) for i in range(5)]
    steps = [b - a for a, b in zip([first, *quick], quick, strict=False)]
    assert steps == sorted(steps)
    assert steps[-1] > HEAD_RESERVATION_MIN * 64
    slow = reservation.reserved
    assert reservation.extend(slow, 10_000_000, 100_000) == slow + HEAD_RESERVATION_MIN


# -- another shard count -----------------------------------------------------------------------------------

NAMES = [f"topic-{i}" for i in range(12)]


def _write_all(world: World, tag: bytes) -> None:
    for name in NAMES:
        if world.run_of(name).core.directory.find(name) is None:
            world.put_topic(name, durability="fsync")
        world.append(name, [name.encode() + tag])


@pytest.mark.parametrize("counts", [(1, 3, 4, 2, 1), (4, 1, 8, 3, 8), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("end", ["kill", "stop", "power"])
def test_everything_is_there_under_every_shard_count(counts, end):
    """SH-4, SH-5, FX-175, FX-177, FX-232, RF-67."""
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


def test_a_crash_between_the_shards_recoveries_loses_nobody_s_tail():
    """SH-5, FX-232: one shard has copied its part of an old file, another has not; then the count changes
    again. Each shard speaks for its own topics only.
    """
    for stops in ((3, 4), (3, 3), (3, 1), (3, 2), (4, 3, 4)):
        disk = FaultyDisk(SimulatedDisk(DATA))
        world = World(disk, shards=1)
        world.start()
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


def test_a_name_made_under_one_count_is_looked_after_by_one_shard_under_the_next():
    """FX-211, T-6, E-6: found where its home points, deleted and made again there, never twice."""
    world = World(SimulatedDisk(DATA), shards=1)
    world.start()
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
        for restart in (world.kill, world.stop):
            restart()
            world.start()
            live = [topic.name for run in world.runs.values() for topic in run.core.directory.by_id.values()]
            assert sorted(live) == sorted(NAMES)
            for name in NAMES[::2]:
                assert world.topic(name).epoch == epochs[name]
                assert world.records(name) == [(1, b"again")]
        world.kill()


def test_a_deleted_topic_stays_deleted_under_every_later_count():
    """FX-211, INV-11."""
    world = World(SimulatedDisk(DATA), shards=3)
    world.start()
    _write_all(world, b"")
    for name in NAMES[:6]:
        world.request(m.TopicDelete(name))
    for count in (1, 4, 2, 3):
        world.kill()
        world.start(count)
        live = {topic.name for run in world.runs.values() for topic in run.core.directory.by_id.values()}
        assert live == set(NAMES[6:])


def test_a_topic_s_appends_lie_in_one_stream():
    """SH-1, SH-2, FX-174: and ids of a shard map to it."""
    world = World(SimulatedDisk(DATA), shards=3)
    world.start()
    _write_all(world, b"")
    for shard, run in world.runs.items():
        for topic in run.core.directory.by_id.values():
            assert shard_of(topic.topic_id, 3) == shard
            located = world.request(m.Locate(topic.name, 0))
            assert {extent.path.split("/")[1] for extent in located.extents} == {f"shard-{shard:02d}"}


# -- what the predecessor said -----------------------------------------------------------------------------


def test_a_header_names_what_of_its_predecessor_was_durable_and_only_that():
    """RD-3: it is taken for evidence later."""
    world = filled()
    durable = world.runs[0].core.log.marked_durable
    world.kill()
    world.start()
    found: Callable[[str], bytes] = lambda name: _file(world.disk, name)  # noqa: E731
    from ringlog.storage.layout import decode_wal_header

    header = decode_wal_header(found("wal-2-0.log")[:4_096], "")
    assert unpack_file(header.prev_file) == (1, 0)
    assert header.prev_stop == durable


def test_a_shard_refuses_to_start_on_damage_and_names_file_and_offset():
    """RE-6, RE-12."""
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


def test_recovery_tells_of_its_progress_within_a_file(monkeypatch):
    """RD-18: who recovers a large file is judged by beats, and the whole file may take long."""
    monkeypatch.setattr("ringlog.storage.recovery.RECOVERY_READ_BYTES", 4096)
    world = World(SimulatedDisk(DATA), file_bytes=256 << 10)
    world.start()
    world.put_topic("f", durability="fsync")
    for _ in range(40):
        world.append("f", [bytes(2_000)])
    world.kill_shard(0)
    beats = []
    beat = Recovery._beat
    monkeypatch.setattr(Recovery, "_beat", lambda self: (beats.append(1), beat(self)))
    world.start_shard(0)
    assert len(beats) > 20
    assert len(world.records("f")) == 40
