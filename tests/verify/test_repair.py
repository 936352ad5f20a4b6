"""`ringlog repair` as a matrix: every kind of file, each kind of damage, with and without a redundant copy.

The directory is the specimen of the chaos class `rot`: two shards, logs of several incarnations, segments
hot, cold and packed, tags, deletion marks, two snapshots of each shard. A started engine reads the repaired
copy. Its records must equal the counts of `verify` and the report of the dry run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.rot.answers import Answers, ask
from chaos.rot.specimen import TOPICS, Specimen, make_specimen
from ringlog.cli.repair.decisions import plan_repair
from ringlog.cli.repair.plan import RepairPlan
from ringlog.cli.repair.repaired_copy import build_copy
from ringlog.storage.layout import QUARANTINE_DIR
from ringlog.verify.directory import Verification, verify_directory
from ringlog.verify.findings import DAMAGE, count_seqs, merge_ranges, subtract_ranges
from tests.support.shard_world import DATA

CHOSEN = (
    "/meta/", "/shard-00/", "/packs/", "topics/0000000000000002/seg-00000000000000000015",
    "topics/0000000000000005/seg-00000000000000000008", "topics/0000000000000001/seg-00000000000000000001",
)  # fmt: skip
"""A pack, segments with and without a log of the same records, and a segment whose data part is cold."""
HARMS = ("flip", "flip header", "missing", "truncated", "zeroed")


@pytest.fixture(scope="module")
def specimen() -> Specimen:
    return make_specimen(1)


@pytest.fixture(scope="module")
def truth(specimen: Specimen) -> Answers:
    return ask(specimen, specimen.files)


def harmed(data: bytes, harm: str) -> bytes | None:
    """Return the bytes of the damaged file, or None if it is deleted."""
    if harm == "missing":
        return None
    if harm == "zeroed":
        return bytes(len(data))
    if harm == "truncated":
        used = len(data.rstrip(b"\0"))
        return data[: max(used * 2 // 3, 1)]
    # A byte in the middle of the used part, or a byte of the header.
    at = 26 if harm == "flip header" else max(len(data.rstrip(b"\0")) * 3 // 5, 1)
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


class Case(NamedTuple):
    path: str
    harm: str
    keeps_log: bool
    has_copy: bool = False
    """The cold tier has an intact copy of the part."""


def cases(specimen: Specimen) -> Iterator[Case]:
    """Return files of every kind with every damage: with and without the log, and with and without a cold
    copy.

    Cases that are equivalent to others are omitted.
    """
    for path in sorted(specimen.files):
        if not path.startswith(DATA) or path in specimen.absorbed or not any(each in path for each in CHOSEN):
            continue
        for harm in HARMS:
            if is_unprovable(specimen, path, harm):
                continue
            yield Case(path, harm, keeps_log=True)
            if path.endswith(".data"):
                yield Case(path, harm, keeps_log=False)
                yield Case(path, harm, keeps_log=False, has_copy=True)


def is_unprovable(specimen: Specimen, path: str, harm: str) -> bool:
    """Return True if no other file in the directory records the content of the damaged file.

    This holds for the newest log file of a stream.
    """
    stream = path.rpartition("/")[0]
    logs = [each for each, data in specimen.files.items() if each.startswith(stream) and any(data[4096:])]
    is_newest = path.endswith(".log") and _place(path) >= _place(max(logs, key=_place))
    return is_newest and harm in {"missing", "truncated", "zeroed"}


def _place(path: str) -> tuple[int, ...]:
    return tuple(int(part) for part in path.removesuffix(".log").split("-")[-2:])


def damaged(specimen: Specimen, case: Case) -> dict[str, bytes]:
    """Return the specimen's files with the damage of the case."""
    files = dict(specimen.files)
    if not case.keeps_log:
        files = {path: data for path, data in files.items() if path not in specimen.absorbed}
    if case.has_copy:
        stem = case.path.removesuffix(".data")
        for path in [each for each in files if each.startswith(stem)]:
            files[path.replace(DATA, "/cold", 1)] = files[path]
    data = harmed(files.pop(case.path), case.harm)
    return files if data is None else files | {case.path: data}


def lay(root: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target = root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def files_of(root: Path, cold: dict[str, bytes]) -> dict[str, bytes]:
    found = {
        f"{DATA}/{path.relative_to(root)}": path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and QUARANTINE_DIR not in path.relative_to(root).parts
    }
    return found | cold


def repaired(
    specimen: Specimen, files: dict[str, bytes], root: Path
) -> tuple[RepairPlan, Verification, Answers]:
    lay(root, files)
    cold_dir = root / "cold"
    cold_dir.mkdir(exist_ok=True)
    plan = plan_repair(str(root / "data"), str(cold_dir), jobs=1)
    target = root / "repaired"
    build_copy(plan, target)
    found = verify_directory(str(target), jobs=1, cold_dir=str(cold_dir))
    cold = {path: data for path, data in files.items() if path.startswith("/cold/")}
    return plan, found, ask(specimen, files_of(target, cold))


def judge(
    truth: Answers, before: Answers, plan: RepairPlan, found: Verification, after: Answers
) -> list[str]:
    """Return the faults of a repair; an empty list means none."""
    wrong = [f"{each.path}: {each.what}" for each in found.findings if each.severity == DAMAGE]
    if after.refused is not None:
        return [*wrong, f"the engine refuses: {after.refused} {after.refused.detail}"]
    verified = {each.topic: each for each in found.topics}
    lost_now = {
        topic.name: plan.lost.get((topic.topic_id, topic.epoch), [])
        for topic in plan.found.histories.live_topics()
    }
    for name in TOPICS:
        sound, got = truth.topics[name], after.topics[name]
        if got.error or got.damage is not None:
            wrong.append(f"{name}: {got.error or got.damage}")
            continue
        if not set(got.records) <= set(sound.records):
            wrong.append(f"{name}: records that nobody wrote")
        seqs = merge_ranges((record[0], record[0]) for record in got.records)
        missing = subtract_ranges(merge_ranges((record[0], record[0]) for record in sound.records), seqs)
        if missing != merge_ranges(lost_now.get(name, [])):
            wrong.append(f"{name}: missing are {missing}, the dry run says {lost_now.get(name)}")
        if got.state[2] < sound.state[2] and not missing:
            wrong.append(f"{name}: the head is {got.state[2]}, was {sound.state[2]}")
        if got.state[4] != len(got.records):
            wrong.append(f"{name}: counts {got.state[4]} records, has {len(got.records)}")
        if name not in verified or verified[name].ranges != seqs:
            wrong.append(f"{name}: verify says {verified[name].ranges}, the engine {seqs}")
        announced = merge_ranges(tuple(each) for each in got.state[8])
        if subtract_ranges(missing, announced):
            wrong.append(f"{name}: {missing} are missing, announced are {announced}")
        was = [] if before.refused is not None else before.topics[name].records
        if not set(was) <= set(got.records):
            wrong.append(f"{name}: {len(was)} records before the repair, {len(got.records)} after it")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".data", ".idx", ".tags", ".del", ".log", "snapshot", "engine"])
@pytest.mark.timeout(240)
def test_a_repair_keeps_every_available_record_and_all_reports_agree(
    specimen: Specimen, truth: Answers, tmp_path: Path, kind: str
) -> None:
    wrong, lost = {}, {}
    for case in [case for case in cases(specimen) if kind in case.path.rpartition("/")[2]]:
        files = damaged(specimen, case)
        plan, found, after = repaired(specimen, files, tmp_path)
        said = judge(truth, ask(specimen, files), plan, found, after)
        if plan.lost and (case.has_copy or kind in {".idx", ".tags", ".del", "snapshot", "engine"}):
            said.append(f"nothing need be lost, the dry run says {plan.lost}")
        if said:
            wrong[case] = said
        lost[case] = count_seqs(span for ranges in plan.lost.values() for span in ranges)
        for name in ("data", "cold", "repaired"):
            shutil.rmtree(tmp_path / name)
    assert lost
    assert not wrong
    if kind == ".data":
        in_log = [case for case in lost if case.keeps_log and not lost[case]]
        assert len([case for case in in_log if lost[case._replace(keeps_log=False)]]) >= 8


@pytest.mark.parametrize("harm", ["missing", "zeroed"])
def test_no_seq_is_reused_after_the_loss_of_the_newest_log_file(
    specimen: Specimen, truth: Answers, tmp_path: Path, harm: str
) -> None:
    """The content of the lost file is unknown, so an upper bound of its seqs is announced as lost."""
    logs = [path for path in specimen.files if path.startswith(f"{DATA}/wal/shard-00/")]
    newest = max((path for path in logs if any(specimen.files[path][4096:])), key=_place)
    plan, found, after = repaired(
        specimen, damaged(specimen, Case(newest, harm, keeps_log=True)), tmp_path
    )  # fmt: skip
    assert after.refused is None
    assert not found.is_damaged, found.findings
    verified = {topic.topic: topic for topic in found.topics}
    for name in TOPICS:
        sound, got = truth.topics[name], after.topics[name]
        seqs = merge_ranges((record[0], record[0]) for record in got.records)
        assert verified[name].ranges == seqs
        assert got.state[2] >= sound.state[2], "the head lies behind every number that was given out"
        gone = {record[0] for record in sound.records} - {record[0] for record in got.records}
        announced = merge_ranges(tuple(each) for each in got.state[8])
        assert not subtract_ranges(merge_ranges((seq, seq) for seq in gone), announced)
    assert plan.lost
