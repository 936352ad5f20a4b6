"""`ringlog verify` and `repair` on segments: every part is damaged in turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ringlog
from ringlog.cli.app import run
from ringlog.cli.outcome import CliExit
from ringlog.limits import SEALED_FRAME_RECORDS
from ringlog.testing.real_engine import engine
from ringlog.verify.findings import count_seqs, merge_ranges, subtract_ranges
from tests.support.sealed_topics import SEALED, SEALED_RECORDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture
def copied(sealed: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copied"
    shutil.copytree(sealed, target)
    return target


def verdict(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    code = run(["verify", str(root), "--output", "json", *more])
    return code, json.loads(capsys.readouterr().out)


def own(root: Path, suffix: str) -> Path:
    return next(root.glob(f"topics/*/seg-*{suffix}"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("more", [[], ["--deep"]])
def test_intact_segments_have_no_findings_and_the_right_counts(sealed: Path, capsys, more: list[str]) -> None:
    code, found = verdict(sealed, capsys, *more)
    assert (code, found["findings"]) == (CliExit.DONE, [])
    a, b, c = found["topics"]
    deleted = sum(i % 7 == 3 for i in range(SEALED_RECORDS))
    assert (a["records"], a["deleted"], a["head"]) == (
        SEALED_RECORDS + 10 - deleted,
        deleted,
        SEALED_RECORDS + 10,
    )
    assert (b["records"], c["records"]) == (100, 150)
    assert found["segments"] >= 2
    assert found["snapshots"] >= 1


DAMAGE = {
    "data": (".data", 9_000),
    "data header": (".data", 30),
    "index": (".idx", 200),
    "tags": (".tags", 300),
    "marks": (".del", 60),
    "marks header": (".del", 20),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_flipped_bit_in_any_part_is_found(copied: Path, capsys, what: str) -> None:
    suffix, offset = DAMAGE[what]
    flip(own(copied, suffix), offset)
    code, found = verdict(copied, capsys)
    assert code == CliExit.DAMAGE
    assert any(each["path"].startswith("topics/") for each in found["findings"])


@pytest.mark.parametrize("suffix", [".data", ".idx", ".tags", ".del"])
def test_a_truncated_part_is_found(copied: Path, capsys, suffix: str) -> None:
    path = own(copied, suffix)
    path.write_bytes(path.read_bytes()[:-9])
    assert verdict(copied, capsys)[0] == CliExit.DAMAGE


def test_a_missing_index_is_a_remark_and_a_missing_segment_is_damage(copied: Path, capsys) -> None:
    own(copied, ".idx").unlink()
    code, found = verdict(copied, capsys)
    assert (code, [each["severity"] for each in found["findings"]]) == (CliExit.DONE, ["remark"])
    shutil.rmtree(own(copied, ".data").parent)
    code, found = verdict(copied, capsys)
    assert code == CliExit.DAMAGE
    assert any("are missing" in each["what"] for each in found["findings"])


def test_an_index_without_its_data_part_is_damage(copied: Path, capsys) -> None:
    """Its snapshot says that the segment was not moved. It was once treated as part of a cold tier that was
    not given."""
    own(copied, ".data").unlink()
    code, found = verdict(copied, capsys)
    assert code == CliExit.DAMAGE
    assert any(each["what"].startswith("the data part is missing") for each in found["findings"])


def test_a_segment_under_another_name_is_found(copied: Path, capsys) -> None:
    for path in list(own(copied, ".data").parent.iterdir()):
        path.rename(path.with_name(path.name.replace("-0001", "-0002")))
    assert verdict(copied, capsys)[0] == CliExit.DAMAGE


def test_a_damaged_snapshot_is_found(copied: Path, capsys) -> None:
    flip(max(copied.glob("meta/snapshot-*")), 120)
    assert verdict(copied, capsys)[0] == CliExit.DAMAGE


def test_inspect_shows_every_part(sealed: Path, capsys) -> None:
    kinds = {}
    for path in [own(sealed, suffix) for suffix in (".data", ".idx", ".tags", ".del")] + [
        max(sealed.glob("meta/snapshot-*"))
    ]:
        assert run(["inspect", str(path), "--json"]) == CliExit.DONE
        found = json.loads(capsys.readouterr().out)
        kinds[found["header"]["kind"]] = found
    assert sum(row["records"] for row in kinds["segment data"]["rows"]) == SEALED_RECORDS
    assert [row["tag"] for row in kinds["segment tags"]["rows"]] == [f"t{i}" for i in range(7)]
    assert kinds["segment marks"]["header"]["deleted"] == sum(i % 7 == 3 for i in range(SEALED_RECORDS))
    assert [row["topic"] for row in kinds["snapshot"]["rows"]] == ["a", "b", "c"]
    assert kinds["segment index"]["header"]["table"][0]["records"] == SEALED_RECORDS


# -- repair -------------------------------------------------------------------------------------------


def repaired(copied: Path, target: Path, capsys) -> dict:
    assert (
        run(["repair", str(copied), "--to", str(target), "--write", "--yes", "--output", "json"])
        == CliExit.DONE
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["repaired"], found["left"]) == (True, [])
    return found


def read_all(url: str, topic: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the seqs read and the gaps of the tombstones."""
    read, told = [], []
    with ringlog.connect(url, wait=10) as client:
        for page in client.reader(topic).pages(1_000):
            read += [record.seq for record in page.records]
            told += [(page.tombstone.gap_from, page.tombstone.gap_to)] if page.tombstone else []
    return read, told


def test_a_repair_rebuilds_a_damaged_index_without_loss(copied: Path, capsys) -> None:
    """The index is rebuilt from the data (S2)."""
    flip(own(copied, ".idx"), 200)
    with engine(wal={"shards": 1}, storage=SEALED) as running:
        running.stop()
        shutil.rmtree(running.data_dir)
        found = repaired(copied, Path(running.data_dir), capsys)
        assert found["lost"] == []
        running.start()
        read, told = read_all(running.url, "a")
    assert (len(read), told) == (SEALED_RECORDS + 10 - sum(i % 7 == 3 for i in range(SEALED_RECORDS)), [])


@pytest.mark.night
def test_a_repair_loses_only_the_records_of_a_damaged_frame(copied: Path, capsys) -> None:
    """Every other frame is kept, and readers get a tombstone for the lost records."""
    path = own(copied, ".data")
    flip(path, 9_000)
    with engine(wal={"shards": 1}, storage=SEALED) as running:
        running.stop()
        shutil.rmtree(running.data_dir)
        assert run(["repair", str(copied), "--to", running.data_dir, "--output", "json"]) == CliExit.DONE
        told = json.loads(capsys.readouterr().out)
        found = repaired(copied, Path(running.data_dir), capsys)
        assert {key: found[key] for key in told if key != "repaired"} == {
            key: value for key, value in told.items() if key != "repaired"
        }, "the dry run says what is done"
        assert [each["path"] for each in found["quarantined"]] == [
            str(path.relative_to(copied))[: -len(".data")]
        ]
        aside = Path(running.data_dir) / "quarantine" / path.relative_to(copied)
        assert aside.read_bytes() == path.read_bytes()
        lost = merge_ranges((each["first"], each["last"]) for each in found["lost"])
        assert {each["topic"] for each in found["lost"]} == {"a"}
        assert 0 < count_seqs(lost) <= SEALED_FRAME_RECORDS
        verified = verdict(Path(running.data_dir), capsys)[1]["topics"][0]
        running.start()
        read, gaps = read_all(running.url, "a")
        assert len(read_all(running.url, "c")[0]) == 150
    alive = [seq for seq in range(1, SEALED_RECORDS + 11) if seq > SEALED_RECORDS or (seq - 1) % 7 != 3]
    assert read == [seq for seq in alive if not any(first <= seq <= last for first, last in lost)]
    assert merge_ranges((seq, seq) for seq in read) == [tuple(each) for each in verified["ranges"]]
    assert not subtract_ranges(lost, merge_ranges(gaps))
