"""The class `absences`: files that are missing at one start. It finds nothing, and detects a recovery that
loses records."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import absences
from chaos.absences.judge import FEWER_SHARDS, MODES, NEVER_COLD, NO_COLD, SAME, all_cases
from chaos.order import Account, Order
from chaos.rot.specimen import make_specimen
from ringlog.actors.wal_shard.recovery.held_records import HeldRecords


def ran(tmp_path: Path, seconds: float = 0.0, **settings: object) -> Account:
    """Return the account of a run of the class. With 0 s it runs one case of each kind of file and mode."""
    account = Account()
    absences.run(Order("absences", 1, seconds, tmp_path, settings), account)
    return account


def test_every_kind_of_file_is_missing_once_in_every_mode() -> None:
    cases = list(all_cases(make_specimen(1)))
    assert len({case.name for case in cases}) == len(cases)
    kinds = {mode: {case.kind for case in cases if case.mode == mode} for mode in MODES}
    hot = {f"{kind} hot" for kind in (".log", ".data", ".idx", ".tags", ".del")}
    for mode, found in kinds.items():
        assert found >= hot | {"nothing"}, mode
    assert kinds[SAME] >= hot | {"snapshot hot", ".data cold"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [SAME, NEVER_COLD, FEWER_SHARDS])
def test_the_records_of_a_missing_file_return_with_it(tmp_path: Path, mode: str) -> None:
    account = ran(tmp_path, modes=[mode])
    assert not account.findings
    assert account.counts["cases"] >= 6
    assert account.counts["appends"] > 50
    if mode == NEVER_COLD:
        assert account.counts["halted topics"] > 0


def test_a_recovery_that_gives_up_missing_records_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = HeldRecords.settle_rows

    def leniently(self: HeldRecords, missing: object) -> None:
        self._losses.is_lenient = True
        whole(self, missing)  # type: ignore[arg-type]

    monkeypatch.setattr(HeldRecords, "settle_rows", leniently)
    account = ran(tmp_path, modes=[NEVER_COLD], paths=".data")
    assert any("announced as lost" in each.what for each in account.findings)


def test_a_recovery_that_ignores_the_cold_tier_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ringlog.actors.wal_shard.recovery.recovery.Recovery._has_or_had_cold", lambda self: False
    )
    account = ran(tmp_path, modes=[NO_COLD], paths="snapshot")
    assert account.findings


def test_a_case_can_be_replayed(tmp_path: Path) -> None:
    case = next(
        each for each in all_cases(make_specimen(1)) if each.mode == NEVER_COLD and ".data" in each.path
    )
    absences.replay(Order("absences", 1, 1.0, tmp_path), f"1:{case.name}")
