"""Damage that the chaos class `rot` found, and that the offline verifier and recovery did not detect
before."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.rot.specimen import Specimen, make_specimen
from ringlog.cli.backup import BackupJob, copy_stopped
from ringlog.cli.repair.decisions import plan_repair
from ringlog.errors import CorruptData, UsageError
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.segment.layout import IDX
from ringlog.segment.segment import Segment
from ringlog.storage.real_disk import RealDisk
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.segment_decoder import next_frame, read_data_header
from ringlog.verify.segment_verifier import verify_segment
from ringlog.verify.wal_decoder import verify_wal
from tests.support.log_world import LogWorld
from tests.support.shard_world import DATA, ENGINE_ID
from tests.support.shard_worlds import started


def test_a_flipped_bit_in_the_record_columns_of_an_index_is_found_without_deep(
    tmp_path: Path,
) -> None:
    world = LogWorld(str(tmp_path))
    world.append([b"a", b"bcd", b"ef"])
    world.seal()
    stem = world.sealed[0].path.removesuffix(".data")
    segment = Segment.open(RealDisk(), str(tmp_path), stem)
    at = int(segment.entries["columns_at"][0])
    segment.close()
    assert at, "sizes differ, so there is a block of columns"
    path = tmp_path / f"{stem}{IDX}"
    sound = path.read_bytes()
    assert not verify_segment(str(tmp_path), stem).is_damaged
    for offset in range(at, len(sound)):
        path.write_bytes(sound[:offset] + bytes([sound[offset] ^ 4]) + sound[offset + 1 :])
        assert verify_segment(str(tmp_path), stem).is_damaged, offset


def test_frames_in_place_of_the_file_header_are_damage() -> None:
    """The header page and the page after it were swapped. Recovery then deleted the file as never used
    (RF-73)."""
    world = started({"t": "fsync"})
    world.append("t", [b"x"])
    world.tick(0.2)
    world.kill()
    path = f"{DATA}/wal/shard-00/wal-1-0.log"
    fd = world.disk.open_for_overwrite(path)
    data = world.disk.read_at(fd, 1 << 20, 0)
    swapped = data[4096:8192] + data[:4096] + data[8192:]
    world.disk.write_at(fd, [swapped], 0)
    world.disk.sync_file(fd)
    world.disk.close(fd)
    assert verify_wal("wal/shard-00/wal-1-0.log", swapped).is_damaged
    world.reboot()
    with pytest.raises(CorruptData, match="frames but no header"):
        world.start()
    assert world.disk.exists(path)


# -- misplaced files (RF-76) ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def specimen() -> Specimen:
    return make_specimen(1)


@pytest.fixture
def laid(specimen: Specimen, tmp_path: Path) -> Path:
    """The specimen's files in a new directory; some of its segments are cold."""
    for path, data in specimen.files.items():
        put(tmp_path, path, data)
    return tmp_path


def put(root: Path, path: str, data: bytes) -> None:
    target = root / path[1:]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def cold_data(specimen: Specimen) -> list[str]:
    found = [path for path in specimen.files if path.startswith("/cold/") and path.endswith(DATA_SUFFIX)]
    assert found
    return found


def verified(root: Path) -> Verification:
    return verify_directory(str(root / "data"), jobs=1, cold_dir=str(root / "cold"))


def said_of(found: Verification, path: str) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in found.findings if each.path == path]


def stem_of(path: str) -> str:
    return path.removeprefix("/cold/").removeprefix("/data/").removesuffix(DATA_SUFFIX)


def test_a_second_copy_in_the_cold_tier_under_another_name_is_reported(
    specimen: Specimen, laid: Path
) -> None:
    """The host has no file of that name. The verifier used to check only the names that the host has."""
    before = verified(laid)
    assert not before.is_damaged
    for path in cold_data(specimen):
        other = path.removesuffix(DATA_SUFFIX)[:-2] + "7e" + DATA_SUFFIX
        put(laid, other, specimen.files[path])
        found = verified(laid)
        what = "is in the cold tier only under the name of another segment: no file on the host refers to it"
        assert said_of(found, stem_of(other)) == [("remark", what)]
        assert found.topics == before.topics, "it vouches for nothing, and takes nothing away"
        assert not found.is_damaged
        (laid / other[1:]).unlink()


def test_a_segment_that_exists_only_in_the_cold_tier_is_reported(specimen: Specimen, laid: Path) -> None:
    """This happens if the host's directory is older than the cold tier."""
    path = next(path for path in specimen.files if path.startswith("/data/topics") and path.endswith(".data"))
    name = stem_of(path)
    for part in [each for each in specimen.files if each.startswith(f"/data/{name}")]:
        put(laid, part.replace("/data/", "/cold/"), specimen.files[part])
        (laid / part[1:]).unlink()
    found = verified(laid)
    assert said_of(found, name) == [("remark", "is in the cold tier only: no file on the host refers to it")]
    assert any("are missing" in what for _, what in said_of(found, ".")), "the host cannot read them"


def test_a_cold_segment_without_its_data_part_is_damage(specimen: Specimen, laid: Path) -> None:
    """It used to be a remark, as if the cold tier had not been given."""
    for path in cold_data(specimen):
        (laid / path[1:]).unlink()
        found = verified(laid)
        what = "the data part is neither here nor in the cold tier"
        assert ("damage", what) in said_of(found, stem_of(path))
        put(laid, path, specimen.files[path])
    without = verify_directory(str(laid / "data"), jobs=1)
    assert not without.is_damaged, "who does not name the cold tier is not told about it"
    away = verify_directory(str(laid / "data"), jobs=1, cold_dir=str(laid / "away"))
    assert not away.is_damaged, "nor when it is not mounted"


def test_a_cold_tier_of_another_engine_is_refused(laid: Path, tmp_path: Path) -> None:
    """Its segments may have the same names. Repair would take records from it, and a backup copy them."""
    put(laid, "/cold/engine", b"bb" * 16)
    for use in (
        lambda: verified(laid),
        lambda: plan_repair(str(laid / "data"), str(laid / "cold"), jobs=1),
        lambda: copy_stopped(
            BackupJob(
                laid / "data", tmp_path / "backup", str(laid / "cold"), is_online=False, disk=RealDisk()
            ),
            1,
        ),
    ):
        with pytest.raises(UsageError, match="belongs to another engine"):
            use()


def test_a_mount_point_without_its_volume_is_refused(laid: Path) -> None:
    """Repair would give the records on the volume up as lost."""
    put(laid, "/data/meta/cold-owner", b"%s confirmed" % ENGINE_ID.hex().encode())
    put(laid, "/cold/engine", ENGINE_ID.hex().encode())
    assert not verified(laid).is_damaged
    (laid / "bare").mkdir()
    with pytest.raises(UsageError, match="mount its volume"):
        plan_repair(str(laid / "data"), str(laid / "bare"), jobs=1)


@pytest.mark.parametrize("how", ["topic", "seq", "pack"])
@pytest.mark.parametrize("suffixes", [(DATA_SUFFIX,), (DATA_SUFFIX, IDX), (IDX,)])
def test_a_segment_under_the_name_of_another_topic_or_seq_is_damage(
    specimen: Specimen, laid: Path, how: str, suffixes: tuple[str, ...]
) -> None:
    """The verifier used to compare only the segment number. The engine compares the whole name."""
    path = next(path for path in specimen.files if path.startswith("/data/topics") and path.endswith(".data"))
    folder, _, name = stem_of(path).rpartition("/")
    other = {
        "topic": f"{folder[:-2]}7e/{name}",
        "seq": f"{folder}/seg-{int(name[4:24]) + 1:020}{name[24:]}",
        "pack": f"packs/pack-{name[25:]}",
    }[how]
    for suffix in suffixes:
        put(laid, f"/data/{other}{suffix}", specimen.files[f"/data/{stem_of(path)}{suffix}"])
    report = verify_segment(str(laid / "data"), other)
    assert "has the name of another segment" in [each.what for each in report.findings]
    assert report.is_damaged
    assert not verify_segment(str(laid / "data"), stem_of(path)).is_damaged


def test_next_frame_returns_the_first_valid_frame_after_damage(specimen: Specimen) -> None:
    """The search uses two bytes of the frame header, which also occur elsewhere."""
    data = max((specimen.files[path] for path in specimen.files if path.endswith(DATA_SUFFIX)), key=len)
    salt = read_data_header(data).salt
    starts, at = [], next_frame(data, 4088, salt)
    while at < len(data):
        starts.append(at)
        at = next_frame(data, at, salt)
    assert starts[0] == 4096
    assert len(starts) == read_data_header(data).frames > 2
    cut = data[: starts[1]] + b"\x01\x01" * 4 + data[starts[1] + 8 :]
    assert next_frame(cut, starts[0], salt) == starts[2]
    assert next_frame(cut, starts[-1], salt) == len(cut)
