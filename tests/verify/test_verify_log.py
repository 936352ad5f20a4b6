"""`ringlog verify` and `repair` on the log of a real engine, first intact, then damaged."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import pytest

import ringlog
from ringlog.cli.app import run
from ringlog.cli.outcome import CliExit
from ringlog.testing.real_engine import engine
from ringlog.verify.directory import verify_directory
from ringlog.verify.findings import count_seqs, merge_ranges, subtract_ranges
from ringlog.verify.wal_decoder import WalFrameWalk, read_header

pytestmark = pytest.mark.slow


def log_with_records(root: Path) -> Path:
    """Return the log file with the first records of `a`."""
    return max(root.glob("wal/shard-*/wal-*.log"), key=lambda path: path.stat().st_size)


def appends(path: Path) -> list[tuple[int, int, int]]:
    """Return (offset, size, first seq) of every append of `a`."""
    data = path.read_bytes()
    seen = WalFrameWalk(data, read_header(data).salt).frames()
    return [
        (s.offset, s.frame.total, s.frame.base_seq) for s in seen if s.frame.type == 1 and s.frame.count == 10
    ]


def flip(path: Path, offset: int, length: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for at in range(offset, offset + length):
        data[at] ^= 0xFF
    path.write_bytes(data)


def verdict(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    code = run(["verify", str(root), "--output", "json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("more", [[], ["--deep"], ["--jobs", "1"]])
def test_the_directory_of_a_stopped_engine_is_intact(left_behind: Path, capsys, more: list[str]) -> None:
    code, found = verdict(left_behind, capsys, *more)
    assert (code, found["damaged"], found["findings"]) == (CliExit.DONE, False, [])
    a, c = found["topics"]
    assert (a["topic"], a["earliest"], a["head"], a["ranges"]) == ("a", 1, 3001, [[1, 3001]])
    assert (c["topic"], c["head"], c["records"]) == ("c", 0, 0)


def test_a_flipped_bit_below_the_durable_mark_is_damage_with_the_lost_seqs(copy: Path, capsys) -> None:
    path = log_with_records(copy)
    offset, _, seq = appends(path)[100]
    flip(path, offset + 100)
    code, found = verdict(copy, capsys)
    assert code == CliExit.DAMAGE
    assert any(each["offset"] == offset and each["what"].startswith("body") for each in found["findings"])
    assert found["topics"][0]["gaps"] == [[seq, 3000]]


def test_a_torn_end_is_a_remark(copy: Path, capsys) -> None:
    """Bytes above the durable position were never acknowledged."""
    path = sorted(copy.glob("wal/shard-*/wal-*.log"))[-1]
    with path.open("ab") as file:
        file.write(b"\x60\0\0\0\x01\x01\x01\0torn")
    code, found = verdict(copy, capsys)
    assert code == CliExit.DONE
    assert [each["severity"] for each in found["findings"]] == ["remark"]


@pytest.mark.parametrize("harm", ["missing", "headless", "renamed", "foreign"])
def test_a_log_file_that_contradicts_the_others_is_damage(copy: Path, capsys, harm: str) -> None:
    path = log_with_records(copy)
    if harm == "missing":
        path.unlink()
    elif harm == "headless":
        flip(path, 40)
    elif harm == "renamed":
        path.rename(path.with_name("wal-99-0.log"))
    else:
        other = next(each for each in copy.glob("wal/shard-*/wal-*.log") if each.parent != path.parent)
        shutil.copy(other, path)
    code, found = verdict(copy, capsys)
    assert code == CliExit.DAMAGE, found


@pytest.mark.parametrize("harm", ["newest", "stream", "everything"])
def test_a_missing_newest_log_file_is_damage(copy: Path, capsys, harm: str) -> None:
    newest = max(copy.glob("wal/shard-00/wal-*.log"), key=lambda path: int(path.stem.split("-")[1]))
    if harm == "newest":
        newest.unlink()
    else:
        shutil.rmtree(copy / ("wal" if harm == "everything" else "wal/shard-00"))
    code, found = verdict(copy, capsys)
    assert code == CliExit.DAMAGE
    said = [each["what"] for each in found["findings"] if each["path"] == "meta/log-00"]
    assert said == [f"the newest WAL file of shard 0 is missing: {newest.name}"]


def test_a_repair_recreates_a_missing_register(copy: Path, tmp_path: Path, capsys) -> None:
    (copy / "meta/log-00").unlink()
    code, found = verdict(copy, capsys)
    assert code == CliExit.DAMAGE
    assert any("meta/log-00" in each["what"] for each in found["findings"])
    target = tmp_path / "repaired"
    assert (
        run(["repair", str(copy), "--to", str(target), "--write", "--yes", "--output", "json"])
        == CliExit.DONE
    )
    capsys.readouterr()
    assert verdict(target, capsys)[0] == CliExit.DONE


def test_a_directory_without_data_is_a_usage_error(tmp_path: Path) -> None:
    assert run(["verify", str(tmp_path)]) == CliExit.USAGE


def test_verify_refuses_a_running_engine() -> None:
    with engine(wal={"shards": 1}) as running:
        assert run(["verify", running.data_dir]) == CliExit.USAGE


# -- repair -------------------------------------------------------------------------------------------


def test_a_repair_without_write_shows_the_loss_and_writes_no_file(copy: Path, tmp_path: Path, capsys) -> None:
    path = log_with_records(copy)
    offset, _, seq = appends(path)[100]
    flip(path, offset + 100)
    target = tmp_path / "repaired"
    assert run(["repair", str(copy), "--to", str(target), "--output", "json"]) == CliExit.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["lost"] == [{"topic": "a", "first": seq, "last": seq + 9, "records": 10}]
    assert not target.exists()


def test_a_repaired_copy_starts_and_readers_get_tombstones_for_the_loss(
    copy: Path, left_behind: Path, tmp_path: Path, capsys
) -> None:
    """Valid frames after the damage are kept, and the original directory is not changed."""
    path = log_with_records(copy)
    frames = appends(path)
    gone = [frames[50], frames[150], frames[151]]
    for offset, _, _ in gone:
        flip(path, offset + 100)
    flip(path, frames[200][0] + 8, frames[200][1])
    before = verify_directory(str(copy)).findings
    with engine(wal={"shards": 2}) as running:
        running.stop()
        target = Path(running.data_dir)
        shutil.rmtree(target)
        assert (
            run(["repair", str(copy), "--to", str(target), "--write", "--yes", "--output", "json"])
            == CliExit.DONE
        )
        found = json.loads(capsys.readouterr().out)
        assert (found["repaired"], found["left"]) == (True, [])
        lost = [(each["first"], each["last"]) for each in found["lost"]]
        expected = [(seq, seq + 9) for _, _, seq in [*gone, frames[200]]]
        assert merge_ranges(lost) == merge_ranges(expected)
        running.start()
        with ringlog.connect(running.url, wait=10) as client:
            read, told = [], []
            for page in client.reader("a").pages(1_000):
                read += [record.seq for record in page.records]
                told += [(page.tombstone.gap_from, page.tombstone.gap_to)] if page.tombstone else []
    everything = [(1, 3001)]
    assert merge_ranges((seq, seq) for seq in read) == subtract_ranges(everything, merge_ranges(expected))
    assert merge_ranges(told) == merge_ranges(expected)
    assert count_seqs(merge_ranges(expected)) == 40
    assert verify_directory(str(copy)).findings == before
    assert filecmp.cmp(left_behind / "meta/engine", copy / "meta/engine", shallow=False)


# -- backup and restore -------------------------------------------------------------------------------


def test_an_offline_backup_is_restored_byte_for_byte_and_a_damaged_one_is_refused(
    left_behind: Path, tmp_path: Path, capsys
) -> None:
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    assert run(["backup", str(left_behind), "--to", str(backup)]) == CliExit.DONE
    assert run(["backup", str(left_behind), "--to", str(backup)]) == CliExit.USAGE, "the target is not empty"
    assert run(["restore", str(backup), "--to", str(restored)]) == CliExit.DONE
    for path in left_behind.glob("wal/shard-*/wal-*.log"):
        assert filecmp.cmp(path, restored / path.relative_to(left_behind), shallow=False)
    assert len(list(left_behind.glob("meta/log-*"))) == len(list(restored.glob("meta/log-*"))) == 2
    assert not verify_directory(str(restored)).is_damaged
    flip(next(backup.glob("wal/shard-*/wal-*.log")), 5_000)
    capsys.readouterr()
    assert run(["restore", str(backup), "--to", str(tmp_path / "again")]) == CliExit.DAMAGE
    assert "checksum differs" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_manifest_with_a_path_outside_of_the_backup_is_refused(
    left_behind: Path, tmp_path: Path, capsys
) -> None:
    backup = tmp_path / "backup"
    assert run(["backup", str(left_behind), "--to", str(backup)]) == CliExit.DONE
    manifest = backup / "manifest.json"
    manifest.write_text(manifest.read_text().replace("meta/engine", "../engine"))
    assert run(["restore", str(backup), "--to", str(tmp_path / "again")]) == CliExit.DAMAGE


def test_inspect_shows_header_and_every_frame(left_behind: Path, capsys) -> None:
    path = log_with_records(left_behind)
    assert run(["inspect", str(path), "--json"]) == CliExit.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["header"]["kind"] == "wal"
    rows = [row for row in found["rows"] if row["type"] == "append"]
    assert sum(row["records"] for row in rows) >= 3_000
    assert {"mark", "topic create"} <= {row["type"] for row in found["rows"]}
    assert run(["inspect", str(left_behind / "meta/engine")]) == CliExit.USAGE
    assert run(["inspect", str(left_behind / "meta/log-00"), "--json"]) == CliExit.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["header"]["kind"], found["header"]["shard"]) == ("register", 0)
    assert found["header"]["file"] > 0
