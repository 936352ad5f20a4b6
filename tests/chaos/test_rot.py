"""The class `rot`: an intact directory has no findings, and readers that ignore damage are detected."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from chaos.order import Account, Order
from chaos.rot import atrest, cases, flip, judge_case, last_frame, places, run
from chaos.rot import bench as rot_bench
from chaos.rot.answers import ask
from chaos.rot.bench import Bench
from chaos.rot.specimen import Specimen, make_specimen
from chaos.rot.truncated import after_truncate
from ringlog.actors.wal_shard.recovery import baseline, file_replay
from ringlog.frame import batch as frames
from ringlog.segment import segment as segments
from ringlog.storage import snapshot as snapshots
from ringlog.storage.recovery import WalTailState
from ringlog.tier import copies as tier_copies
from ringlog.verify import directory, segment_decoder, segment_verifier

FLIPS = 60
CASES = 30


@pytest.fixture(scope="module")
def specimen() -> Specimen:
    return make_specimen(1)


@pytest.fixture
def bench(specimen: Specimen, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(specimen, tmp_path)
    yield made
    made.close()


def flips_of(bench: Bench, kind: str, count: int) -> list[str]:
    """Return the faults after bit flips in files whose path contains `kind`."""
    chosen = [each for each in places(bench.specimen, random.Random(3), 1) if kind in each[0]][:count]
    assert len(chosen) == count
    return [wrong for path, at, bit in chosen if (wrong := flip(bench, path, at, bit)[0])]


def test_the_specimen_has_every_kind_of_file_in_both_tiers(specimen: Specimen) -> None:
    kinds = {cases.kind_of(path) for path in specimen.files}
    assert kinds == set(cases.KINDS)
    assert any(path.startswith("/cold/") and path.endswith(".data") for path in specimen.files)
    assert any("/packs/" in path for path in specimen.files)
    assert len([path for path in specimen.files if "snapshot-" in path]) == 4


def test_a_specimen_is_the_same_for_the_same_seed() -> None:
    """Otherwise no case could be replayed. Salts of segments are random, and so are the bytes that depend on
    them."""
    one, other = make_specimen(5), make_specimen(5)
    assert list(one.files) == list(other.files)
    assert [len(data) for data in one.files.values()] == [len(data) for data in other.files.values()]


def test_flipped_bits_of_every_kind_of_file_are_detected_or_change_nothing(bench: Bench) -> None:
    assert flips_of(bench, "/", FLIPS) == []
    for kind in (*cases.KINDS[1:], "engine"):
        assert flips_of(bench, kind, 3) == []


def test_larger_damage_is_detected_or_changes_nothing(bench: Bench) -> None:
    everything = list(cases.all_cases(bench.specimen))
    assert {case.row for case in everything} == {f"RF-{n}" for n in (73, 74, 75, 76, 77, 78, 79, 81)}
    chosen = random.Random(4).sample(everything, CASES)
    wrong = {case.name: found for case in chosen if (found := judge_case(bench, case, Account()))}
    assert wrong == {}


def test_flips_are_detected_in_a_file_that_was_missing_before(bench: Bench) -> None:
    """The bench restores a file under its name. The next damage must affect exactly that file."""
    away = next(case for case in cases.whole_files(bench.specimen) if case.name.endswith("wal-1-7.log"))
    assert away.name.startswith("missing")
    assert judge_case(bench, away, Account()) == ""
    assert flips_of(bench, "wal-1-7.log", 3) == []


def test_the_last_acknowledged_frame_is_covered_by_the_board() -> None:
    """The board's marks prove that the frame was acknowledged (RF-72)."""
    specimen = make_specimen(1, is_marked=False)
    truth = ask(specimen, specimen.files, keeps_board=True)
    for path, (start, stop) in cases.last_frames(specimen).items():
        for at in (start, start + 20, (start + stop) // 2):
            assert last_frame(specimen, path, at, truth) == ""


@pytest.mark.parametrize(("row", "name", "case"), list(atrest.cases()), ids=lambda value: str(value)[:24])
def test_damage_at_rest_is_not_copied(row, name, case) -> None:
    """Moves and rewrites verify their source (RF-80, RF-82)."""
    assert case() == "", (row, name)


def test_the_verifier_reports_every_misplaced_segment(bench: Bench) -> None:
    """Segments have other seqs, topics or kinds in their name, on the host and in the cold tier (RF-76)."""
    found = [
        each for each in cases.whole_files(bench.specimen) if each.name.startswith(("doubled", "renamed"))
    ]
    chosen = [each for each in found if any("/cold/" in path for path in each.damaged)]
    assert {each.name.partition(" /")[0] for each in chosen} >= {
        "doubled", "renamed", "doubled in another topic", "doubled from another seq", "renamed as a pack",
    }  # fmt: skip
    assert {each.name: wrong for each in chosen if (wrong := judge_case(bench, each, Account()))} == {}


def test_two_unused_log_files_may_be_swapped(specimen: Specimen) -> None:
    """Both files are all zeros and have no identity, so there is nothing to detect."""
    unused = {
        path for path, data in specimen.files.items() if path.endswith(".log") and not data.strip(b"\0")
    }
    assert len(unused) > 1
    swapped = [each for each in cases.whole_files(specimen) if each.name.startswith("swapped")]
    assert not [each.name for each in swapped if each.damaged <= unused]
    assert [each.name for each in swapped if each.damaged & unused], "with one that was used"


# -- planted bugs: readers that ignore damage ------------------------------------------------------------


def test_a_reader_that_skips_body_checksums_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "first_bad_body", lambda *_: None)
    assert any("and no word about it" in wrong for wrong in flips_of(bench, "wal-3-0.log", 40))


def test_a_recovery_that_cuts_the_log_at_damage_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery treats damage in the middle of the log as a torn end (mutant 10)."""
    monkeypatch.setattr(file_replay, "classify_tail", lambda scan, evidence: WalTailState.TORN)
    assert flips_of(bench, "wal-3-0.log", 30) != []


def test_a_reader_that_skips_snapshot_checksums_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(data: Any, path: str) -> Any:
        head = bytearray(data[:96])
        head[80:88] = xxhash.xxh3_64_intdigest(data[96:]).to_bytes(8, "little")
        head[88:] = xxhash.xxh3_64_intdigest(bytes(head[:88])).to_bytes(8, "little")
        return real(bytes(head) + bytes(data[96:]), path)

    real = snapshots.decode_snapshot
    monkeypatch.setattr(snapshots, "decode_snapshot", trusting)
    monkeypatch.setattr(baseline, "decode_snapshot", trusting)
    monkeypatch.setattr(rot_bench, "decode_snapshot", trusting)
    assert flips_of(bench, "snapshot-", 60) != []


def test_a_reader_that_skips_index_checksums_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of the index are used without their checksum (mutant 42)."""
    real = segments.read_tables

    def trusting(header: Any, data: bytes, size: int, path: str) -> Any:
        return real(dataclasses.replace(header, tables_xxh3=xxhash.xxh3_64_intdigest(data)), data, size, path)

    monkeypatch.setattr(segments, "read_tables", trusting)
    assert flips_of(bench, ".idx", 40) != []


def test_a_move_without_verification_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relocator deletes the source without a check of the copy (mutant 12)."""
    monkeypatch.setattr(tier_copies, "verify_data_part", lambda *_: None)
    assert any(case() for row, name, case in atrest.cases() if name.startswith("move"))


def test_a_verifier_without_checks_is_detected(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_verifier, "_follows", lambda *_: None)
    monkeypatch.setattr(segment_decoder, "_checked", lambda *_: None)
    assert any("verifier" in wrong for wrong in flips_of(bench, ".del", 30))


@pytest.mark.night
@pytest.mark.timeout(240)
def test_a_run_counts_its_work_and_finds_nothing(account: Account, tmp_path: Path) -> None:
    run(Order("rot", 2, 120.0, tmp_path, {"bytes_max": 50, "cases_share": 0.01}), account)
    assert account.findings == []
    assert account.counts["bytes_flipped"] == 50
    assert set(account.faults) == {f"RF-{n}" for n in range(70, 83)}


def test_settings_narrow_the_class_rot(account: Account, tmp_path: Path) -> None:
    settings = {"only": ["RF-80", "RF-79"], "suffix": ".idx"}
    run(Order("rot", 1, 2.0, tmp_path, settings), account)
    assert account.findings == []
    assert account.faults.keys() == {"RF-79", "RF-80"}


def test_a_verifier_that_ignores_the_cold_tiers_files_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_COLD", ())
    doubled = [each for each in cases.whole_files(bench.specimen) if each.name.startswith("doubled /cold/")]
    assert doubled
    assert all("does not report" in judge_case(bench, each, Account()) for each in doubled)


def test_a_verifier_that_reports_lost_data_as_a_remark_is_detected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.isdir", lambda _: False)  # as if the directory could not be read
    missing = [each for each in cases.whole_files(bench.specimen) if each.name.startswith("missing /cold/")]
    assert missing
    assert all("reports no damage for the loss" in judge_case(bench, each, Account()) for each in missing)


def test_records_missing_from_an_undamaged_log_are_given_up_once(specimen: Specimen) -> None:
    """A complete frame overwrote another one: all checksums match, and records before the next frame are
    missing.

    A start with `truncate` gave them up, but each later start refused the log.
    """
    path = "/data/wal/shard-00/wal-3-0.log"
    case = next(
        each for each in cases.all_cases(specimen)
        if (each.row, each.name) == ("RF-75", f"frame 7864 at 6072 of {path}")
    )  # fmt: skip
    assert after_truncate(specimen, case.files) == ""
