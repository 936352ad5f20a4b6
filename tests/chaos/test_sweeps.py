"""The class `sweeps`: a small run of each part, and the mistakes it has to catch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from actors.compactor.checkpoint import CheckpointTask
from actors.gateway.core import GatewayCore
from actors.wal_shard.core import ShardCore
from actors.wal_shard.events import Sync
from actors.wal_shard.recovery.recovery import Recovery
from actors.wal_shard.retention.checkpoint import ShardCheckpoint
from chaos import sweeps
from chaos.order import Account, Broken, Order
from chaos.rigs.judge import KILL, POWER_LOSS
from chaos.sweeps import allocations, calls, gateway, lines
from chaos.sweeps.house import House
from chaos.sweeps.judge import ENDS, ENDS_EACH, Known, end_and_judge
from chaos.sweeps.workloads import BY_NAME, WORKLOADS
from ringlog.clock import SystemClock
from ringlog.envelope import messages as m
from ringlog.errors import DiskError
from ringlog.storage.snapshot import Snapshot
from ringlog.storage.wal import WalWriter
from ringlog.testing.disk import FaultyDisk, Monitor, SyncOrderViolation

IMAGES = {name: BY_NAME[name].image() for name in ("commit", "recovery", "checkpoint")}


def sweep_of(tmp_path, account: Account) -> sweeps._Sweep:
    return sweeps._Sweep(Order("sweeps", 1, 1.0, tmp_path), account, sweeps.SETTINGS, IMAGES)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_does_something_and_holds(workload) -> None:
    """A workload that fails without a fault, or calls nothing, proves nothing."""
    image = workload.image()
    made = calls.calls_of(workload, image)
    assert len(made) > 8
    for how in (KILL, POWER_LOSS):
        house = calls.begin(workload, image)
        calls.act(workload, house)
        assert house.model.failed == 0
        end_and_judge(house, how, 1, deep=True)


def _sweep(name: str, take: Callable[[calls.Case], bool] = lambda case: True) -> list[str]:
    """Some call cases of one workload; what was found."""
    workload, image = BY_NAME[name], IMAGES[name]
    made = {name: calls.calls_of(workload, image)}
    found = []
    for case in [each for one in calls.cases(made) for each in one.with_ends(len(ENDS))]:
        if take(case):
            try:
                calls.run_case(case, image)
            except Broken as e:
                found.append(str(e))
    return found


def test_failing_calls_of_a_commit_lose_nothing() -> None:
    """RF-37, RF-39, RF-40: each of its calls, every error, one end each."""
    assert _sweep("commit", lambda case: case.nth == 2 and case.kind in {"EIO", "short"}) == []


def test_an_ack_before_the_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant 1."""
    monkeypatch.setattr(ShardCore, "_on_written", ShardCore._finish_batch)
    with pytest.raises(SyncOrderViolation):  # O2, live
        _sweep("commit")
    monkeypatch.setattr(Monitor, "require_durable", lambda *_: None)
    assert _sweep("commit", lambda case: case.kind == "EIO" and case.end == POWER_LOSS)  # O1, afterwards


def test_a_swallowed_disk_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails, and nobody is told."""
    append = WalWriter.append

    def careless(self: WalWriter, *args: object, **options: object) -> None:
        try:
            append(self, *args, **options)  # type: ignore[arg-type]
        except DiskError:
            self._offset = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(WalWriter, "append", careless)
    assert _sweep("commit", lambda case: case.op == "write" and case.kind == "EIO" and not case.always)


def test_a_sync_that_is_tried_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant 5: the second sync works, and what the first one lost is acknowledged."""
    sync = WalWriter.sync

    def stubborn(self: WalWriter) -> None:
        try:
            sync(self)
        except DiskError:
            sync(self)

    monkeypatch.setattr(WalWriter, "sync", stubborn)
    assert _sweep("commit", lambda case: case.op == "data_sync" and case.kind == "EIO")


def test_a_log_that_goes_with_a_snapshot_that_failed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant 14's neighbour. Either mistake alone is harmless: a log is kept until a second snapshot names
    what replaces it."""
    write, done = CheckpointTask._write_snapshot, ShardCheckpoint._done

    def careless(self: CheckpointTask, base: Snapshot) -> int:
        try:
            return write(self, base)
        except DiskError:
            return self.plan.number + 1

    def hasty(self: ShardCheckpoint, *args: object) -> object:
        answer = done(self, *args)  # type: ignore[arg-type]
        return m.CheckpointClosed([path for _, path in self._waiting]) if self._waiting else answer

    monkeypatch.setattr(CheckpointTask, "_write_snapshot", careless)
    monkeypatch.setattr(ShardCheckpoint, "_done", hasty)
    assert _sweep("checkpoint", lambda case: case.kind == "EIO" and not case.always)


def test_lines_of_a_commit_and_a_recovery() -> None:
    """RF-3: a slice of the stretches and of the lines."""
    for name in ("commit", "recovery"):
        stretches = lines.stretches_of(BY_NAME[name], IMAGES[name])
        assert sum(count for _, count in stretches) > 3_000
        for first, _ in stretches[::4]:
            lines.run_case(lines.Case(name, first, lines.DEATH), IMAGES[name])
        executed = lines.lines_of(BY_NAME[name], IMAGES[name])
        several = lines.cases(BY_NAME[name], executed, random.Random(1))
        struck = {lines.run_case(next(several), IMAGES[name]) for _ in range(12)}
        assert len(struck) > 6


def test_a_swallowed_exception_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant 40."""
    handle = ShardCore.handle

    def careless(self: ShardCore, events: list[object]) -> list[object]:
        try:
            return handle(self, events)
        except Exception:  # noqa: BLE001  the mistake
            return []

    monkeypatch.setattr(ShardCore, "handle", careless)
    several = lines.cases(BY_NAME["commit"], _lines("commit"), random.Random(2))
    chosen = [next(several) for _ in range(20)]
    assert any(_is_caught(case) for case in chosen)


def _is_caught(case: lines.Case) -> bool:
    try:
        lines.run_case(case, IMAGES["commit"])
    except (Broken, KeyError):
        return True
    return False


def test_an_exception_that_the_gateway_swallows_is_caught(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant 40, in another core."""
    account = Account()
    sweep_of(tmp_path, account).do({"gateway": 0.0})
    assert account.counts["line_runs"] > 200
    assert not account.findings
    handle = GatewayCore.handle

    def careless(self: GatewayCore, events: list[object]) -> list[object]:
        try:
            return handle(self, events)
        except Exception:  # noqa: BLE001  the mistake
            return []

    monkeypatch.setattr(GatewayCore, "handle", careless)
    with pytest.raises(Broken):
        gateway.run_one(len(gateway.MESSAGES) * 10)


def _lines(name: str) -> list[lines.Line]:
    return lines.lines_of(BY_NAME[name], IMAGES[name])


def test_recovery_may_die_again_and_again() -> None:
    """RF-13: k = 1, 3."""
    for deaths in (1, 3):
        assert lines.recover_killed(IMAGES["recovery"], deaths, random.Random(deaths)) > 0


@pytest.mark.parametrize("name", ["append", "encode"])
def test_allocations_that_fail(name: str) -> None:
    """RF-18: a slice."""
    operation = allocations.BY_OPERATION[name]
    image = IMAGES["commit"]
    count = allocations.allocations_of(operation, image)
    assert count > 40
    tally, found = allocations.Tally(), []
    allocations.run_batch(
        operation, image, list(range(0, count, count // 8)), tally, lambda *f: found.append(f)
    )
    assert not found
    assert tally.raised + tally.failed > 3


def test_what_a_child_judged_the_next_ones_know_and_do_not_tell_again() -> None:
    """Else each batch would tell all that the ones before it told, twice as much every time."""
    known, append = Known(), allocations.BY_OPERATION["append"]
    for _ in range(3):
        allocations.run_batch(append, IMAGES["commit"], [0, 20], allocations.Tally(), pytest.fail, known)
        assert known.fresh == []
    assert known.good


def test_syncs_that_do_nothing_leave_what_is_dense() -> None:
    """RF-44, RF-56."""
    for directories in (False, True):
        calls.run_lie(BY_NAME["commit"], IMAGES["commit"], 1, directories=directories)


def test_the_class_counts_what_it_did(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of the cases that ran."""
    account = Account()
    sweep = sweep_of(tmp_path, account)
    sweep._line(lines.Case("commit", 10, lines.DEATH), Known(), "RF-3")
    sweep._line(lines.Case("commit", 10_000_000, lines.DEATH), Known(), "RF-3")
    assert account.counts["line_runs"] == account.faults["RF-3"] == ENDS_EACH
    case = calls.Case("commit", "write", 1, "EIO", False, ENDS[0])
    assert calls.Case.parse(str(case)) == case
    assert set(case.rows()) == {"RF-37", "RF-39"}


def test_what_faults_leave_alike_is_judged_once_and_what_differs_each_time() -> None:
    """A look at one is a look at the other only when nothing tells them apart."""
    image, known = IMAGES["commit"], Known()

    def after(act: Callable[[House], None], *, deep: bool = False) -> int:
        house = House(image, FaultyDisk)
        house.start()
        act(house)
        before = known.judged
        end_and_judge(house.twin(), POWER_LOSS, 1, known=known, deep=deep)
        end_and_judge(house, KILL, 1, known=known, deep=deep)
        return known.judged - before

    assert after(lambda house: house.append("f", 1)) == 2
    assert after(lambda house: house.append("f", 1)) == 0
    assert after(lambda house: house.append("f", 1), deep=True) == 2, "a deep look sees more"
    assert after(lambda house: house.append("f", 2)) == 2
    assert after(lambda house: house.world.clock.advance(1.0)) == 2

    def forget(house: House) -> None:
        house.append("f", 1)
        house.model.frames.pop()

    with pytest.raises(Broken, match="never sent"):
        after(forget)


def test_a_twin_lives_by_itself() -> None:
    """What is done in one house does not show in the other, and both come to the same."""
    house = House(IMAGES["commit"], FaultyDisk)
    house.start()
    house.append("f", 2)
    twin = house.twin()
    assert twin.digest() == house.digest()
    twin.base.process_kill()
    twin.start()
    twin.append("f", 1)
    assert twin.digest() != house.digest()
    end_and_judge(house, KILL, 1, deep=True)


def test_a_house_is_as_its_image() -> None:
    """Runs do not touch the image they begin on."""
    image = IMAGES["commit"]
    before = dict(image.files)
    house = House(image, FaultyDisk)
    house.start()
    house.append("f", 1)
    assert image.files == before
    assert house.model.acked == image.model.acked + 1


def _reads(name: str) -> list[str]:
    found = []
    for case in calls.read_cases({name: calls.looks_of(BY_NAME[name], IMAGES[name])}):
        try:
            calls.run_case(case, IMAGES[name])
        except Broken as e:
            found.append(str(e))
    return found


def test_reads_that_fail_are_not_taken_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """RF-50, RF-51, mutant 16: a directory that cannot be listed is not an empty one."""
    assert _reads("recovery") == []
    relevant_files = Recovery._relevant_files

    def careless(self: Recovery) -> list[object]:
        try:
            return relevant_files(self)  # type: ignore[return-value]
        except DiskError:
            return []

    monkeypatch.setattr(Recovery, "_relevant_files", careless)
    assert _reads("recovery")


def test_what_is_shown_before_its_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant 2."""
    on_written = ShardCore._on_written

    def hasty(self: ShardCore) -> None:
        on_written(self)
        self._effects.sort(key=lambda effect: isinstance(effect, Sync))

    monkeypatch.setattr(ShardCore, "_on_written", hasty)
    with pytest.raises(SyncOrderViolation):
        BY_NAME["commit"].image()


def test_the_class_can_be_narrowed(tmp_path) -> None:
    account = Account()
    settings = {"only": ["reads"], "workloads": ["recovery"]}
    sweeps.run(Order("sweeps", 1, 0.0, tmp_path, settings), account)
    assert account.counts["read_runs"] == account.counts["call_runs"] == sweeps.READS_MIN
    assert set(account.faults) == {"RF-51"}
    assert not account.findings


class Owner:
    """Lets go of what it has when it goes itself; `SystemClock` stands for a part of ours."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        self.close_part()

    def close_part(self) -> None:
        SystemClock().now_us()


def test_what_finalizers_run_is_passed_over_however_deep() -> None:
    """An exception there goes nowhere, and was taken for one that we had swallowed."""
    owner = Owner()
    with lines.Tracer(0, lambda: None) as asked:
        owner.close()
    assert asked.count > 0
    with lines.Tracer(0, lambda: None) as gone:
        del owner
    assert gone.count == 0
