"""The class `sweeps`: a small run of each part, and the bugs that it must detect."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from chaos import sweeps
from chaos.order import Account, Order
from chaos.rigs.judge import KILL, POWER_LOSS
from chaos.sweeps import allocations, calls, gateway, lines
from chaos.sweeps.house import FaultyEngine
from chaos.sweeps.judge import ENDS, ENDS_EACH, Known, end_and_judge
from chaos.sweeps.workloads import BY_NAME, WORKLOADS
from ringlog.actors.compactor.checkpoint import CheckpointTask
from ringlog.actors.gateway.core import GatewayCore
from ringlog.actors.wal_shard.commit.batch_committer import BatchCommitter
from ringlog.actors.wal_shard.core import ShardCore
from ringlog.actors.wal_shard.events import Sync
from ringlog.actors.wal_shard.recovery.log_files import LogFiles
from ringlog.actors.wal_shard.retention.checkpoint import ShardCheckpoint
from ringlog.clock import SystemClock
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.errors import DiskError
from ringlog.storage.snapshot import Snapshot
from ringlog.storage.wal import WalWriter
from ringlog.testing.disk import FaultyDisk, Monitor, SyncOrderViolation

IMAGES = {name: BY_NAME[name].image() for name in ("commit", "recovery", "checkpoint")}


def sweep_of(tmp_path, account: Account) -> sweeps._Sweep:
    return sweeps._Sweep(Order("sweeps", 1, 1.0, tmp_path), account, sweeps.SETTINGS, IMAGES)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_makes_calls_and_passes(workload) -> None:
    """A workload that fails without a fault, or that makes no calls, proves nothing."""
    image = workload.image()
    made = calls.calls_of(workload, image)
    assert len(made) > 8
    for how in (KILL, POWER_LOSS):
        house = calls.begin(workload, image)
        calls.act(workload, house)
        assert house.model.failed == 0
        end_and_judge(house, how, 1, deep=True)


def _sweep(name: str, take: Callable[[calls.Case], bool] = lambda case: True) -> list[str]:
    """Run some call cases of one workload. Return the findings."""
    workload, image = BY_NAME[name], IMAGES[name]
    made = {name: calls.calls_of(workload, image)}
    found = []
    for case in [each for one in calls.cases(made) for each in one.with_ends(len(ENDS))]:
        if take(case):
            try:
                calls.run_case(case, image)
            except GuaranteeBroken as e:
                found.append(str(e))
    return found


def test_failing_calls_of_a_commit_lose_no_acknowledged_record() -> None:
    """Each call fails with each error, followed by one kind of crash (RF-37, RF-39, RF-40)."""
    assert _sweep("commit", lambda case: case.nth == 2 and case.kind in {"EIO", "short"}) == []


def test_an_ack_before_the_sync_is_detected_by_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor detects it during the run, and the judge detects it after the crash (mutant 1)."""
    monkeypatch.setattr(BatchCommitter, "on_written", BatchCommitter.finish)
    with pytest.raises(SyncOrderViolation):  # the monitor, during the run
        _sweep("commit")
    monkeypatch.setattr(Monitor, "require_durable", lambda *_: None)
    # the judge, after the crash
    assert _sweep("commit", lambda case: case.kind == "EIO" and case.end == POWER_LOSS)


def test_an_ignored_disk_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write fails, and the shard ignores the error."""
    append = WalWriter.append

    def careless(self: WalWriter, *args: object, **options: object) -> None:
        try:
            append(self, *args, **options)  # type: ignore[arg-type]
        except DiskError:
            self._offset = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(WalWriter, "append", careless)
    assert _sweep("commit", lambda case: case.op == "write" and case.kind == "EIO" and not case.always)


def test_a_retried_sync_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sync succeeds, and the shard acks the bytes that the first one lost (mutant 5)."""
    sync = WalWriter.sync

    def stubborn(self: WalWriter) -> None:
        try:
            sync(self)
        except DiskError:
            sync(self)

    monkeypatch.setattr(WalWriter, "sync", stubborn)
    assert _sweep("commit", lambda case: case.op == "data_sync" and case.kind == "EIO")


def test_a_log_removed_after_a_failed_snapshot_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two planted bugs alone is harmless: a log is kept until a second snapshot covers it."""
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


def test_deaths_at_lines_of_a_commit_and_a_recovery_pass() -> None:
    """A slice of the line ranges and of the lines (RF-3)."""
    for name in ("commit", "recovery"):
        stretches = lines.stretches_of(BY_NAME[name], IMAGES[name])
        assert sum(count for _, count in stretches) > 3_000
        for first, _ in stretches[::4]:
            lines.run_case(lines.Case(name, first, lines.DEATH), IMAGES[name])
        executed = lines.lines_of(BY_NAME[name], IMAGES[name])
        several = lines.cases(BY_NAME[name], executed, random.Random(1))
        struck = {lines.run_case(next(several), IMAGES[name]) for _ in range(12)}
        assert len(struck) > 6


def test_an_ignored_exception_of_the_shard_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core ignores an exception of its event handler (mutant 40)."""
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
    except (GuaranteeBroken, KeyError):
        return True
    return False


def test_an_ignored_exception_of_the_gateway_is_detected(
    account: Account, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bug in the core of the gateway (mutant 40)."""
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
    assert any(_is_swallowed(nth) for nth in range(100, 200, 7))


def _is_swallowed(nth: int) -> bool:
    try:
        gateway.run_one(nth)
    except GuaranteeBroken:
        return True
    return False


def _lines(name: str) -> list[lines.Line]:
    return lines.lines_of(BY_NAME[name], IMAGES[name])


def test_recovery_succeeds_after_repeated_deaths() -> None:
    """Recovery dies once, and three times in a row (RF-13)."""
    for deaths in (1, 3):
        assert lines.recover_killed(IMAGES["recovery"], deaths, random.Random(deaths)) > 0


@pytest.mark.parametrize("name", ["append", "encode"])
def test_failing_allocations_pass(name: str) -> None:
    """A slice of all allocations (RF-18)."""
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


def test_a_child_reports_only_states_that_no_earlier_child_reported() -> None:
    """Otherwise each batch would repeat all earlier reports, and their size would double each time."""
    known, append = Known(), allocations.BY_OPERATION["append"]
    for _ in range(3):
        allocations.run_batch(append, IMAGES["commit"], [0, 20], allocations.Tally(), pytest.fail, known)
        assert known.fresh == []
    assert known.good


def test_syncs_without_effect_leave_dense_seqs() -> None:
    """The same holds for directory syncs (RF-44, RF-56)."""
    for directories in (False, True):
        calls.run_lie(BY_NAME["commit"], IMAGES["commit"], 1, directories=directories)


def test_the_class_counts_its_work(account: Account, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counted rows are those of the cases that ran."""
    sweep = sweep_of(tmp_path, account)
    sweep._line(lines.Case("commit", 10, lines.DEATH), Known(), "RF-3")
    sweep._line(lines.Case("commit", 10_000_000, lines.DEATH), Known(), "RF-3")
    assert account.counts["line_runs"] == account.faults["RF-3"] == ENDS_EACH
    case = calls.Case("commit", "write", 1, "EIO", False, ENDS[0])
    assert calls.Case.parse(str(case)) == case
    assert set(case.rows()) == {"RF-37", "RF-39"}


def test_equal_states_are_judged_once() -> None:
    """Two states share one judgement only if they are equal in every respect."""
    image, known = IMAGES["commit"], Known()

    def after(act: Callable[[FaultyEngine], None], *, deep: bool = False) -> int:
        house = FaultyEngine(image, FaultyDisk)
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

    def forget(house: FaultyEngine) -> None:
        house.append("f", 1)
        house.model.frames.pop()

    with pytest.raises(GuaranteeBroken, match="never sent"):
        after(forget)


def test_a_twin_is_independent_of_its_original() -> None:
    """An operation in one house does not affect the other. The same operations give the same state."""
    house = FaultyEngine(IMAGES["commit"], FaultyDisk)
    house.start()
    house.append("f", 2)
    twin = house.twin()
    assert twin.digest() == house.digest()
    twin.base.process_kill()
    twin.start()
    twin.append("f", 1)
    assert twin.digest() != house.digest()
    end_and_judge(house, KILL, 1, deep=True)


def test_a_run_does_not_change_its_image() -> None:
    """The next run starts from the same files."""
    image = IMAGES["commit"]
    before = dict(image.files)
    house = FaultyEngine(image, FaultyDisk)
    house.start()
    house.append("f", 1)
    assert image.files == before
    assert house.model.acked == image.model.acked + 1


def _reads(name: str) -> list[str]:
    found = []
    for case in calls.read_cases({name: calls.looks_of(BY_NAME[name], IMAGES[name])}):
        try:
            calls.run_case(case, IMAGES[name])
        except GuaranteeBroken as e:
            found.append(str(e))
    return found


def test_a_failed_read_is_not_treated_as_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be listed is not an empty one (RF-50, RF-51, mutant 16)."""
    assert _reads("recovery") == []
    relevant = LogFiles.relevant

    def careless(self: LogFiles) -> list[object]:
        try:
            return relevant(self)  # type: ignore[return-value]
        except DiskError:
            return []

    monkeypatch.setattr(LogFiles, "relevant", careless)
    assert _reads("recovery")


def test_a_publication_before_the_sync_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard publishes a frame before the sync that covers it (mutant 2)."""
    on_written = BatchCommitter.on_written

    def hasty(self: BatchCommitter) -> None:
        on_written(self)
        self._state.effects.sort(key=lambda effect: isinstance(effect, Sync))

    monkeypatch.setattr(BatchCommitter, "on_written", hasty)
    with pytest.raises(SyncOrderViolation):
        BY_NAME["commit"].image()


def test_settings_narrow_the_class_sweeps(account: Account, tmp_path) -> None:
    settings = {"only": ["reads"], "workloads": ["recovery"]}
    sweeps.run(Order("sweeps", 1, 0.0, tmp_path, settings), account)
    assert account.counts["read_runs"] == account.counts["call_runs"] == sweeps.READS_MIN
    assert set(account.faults) == {"RF-51"}
    assert not account.findings


class Owner:
    """Closes its part in its finalizer. `SystemClock` stands for a traced module."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        self.close_part()

    def close_part(self) -> None:
        SystemClock().now_us()


def test_code_under_finalizers_is_not_traced() -> None:
    """An exception in a finalizer goes nowhere, and was once counted as an ignored exception."""
    owner = Owner()
    with lines.Tracer(0, lambda: None) as asked:
        owner.close()
    assert asked.count > 0
    with lines.Tracer(0, lambda: None) as gone:
        del owner
    assert gone.count == 0
