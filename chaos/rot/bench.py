"""The specimen on a bench: one file of it is damaged, and everybody who reads it says what he makes of it.

Three readers judge each damage. The *engine's* own code reads the damaged file in memory. The *offline
verifier* reads it from a real directory. And an *engine started* on the damaged directory answers every
question; that takes a hundred times longer, so it is asked once for each distinct thing that the engine's
code can make of a file (its view): recovery and readers depend on a file's bytes by nothing else.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chaos.rot.answers import Answers, ask
from chaos.rot.compare import compare
from chaos.rot.image_disk import ImageDisk
from chaos.rot.specimen import COLD, Specimen
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError, StartRefused
from ringlog.frame import batch as frames
from ringlog.frame.layout import HEADER_BYTES, W_TOPIC
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.segment.layout import DEL, IDX, TAGS
from ringlog.segment.segment import Segment
from ringlog.storage.layout import decode_wal_header, header_verifies
from ringlog.storage.log_register import decode_register
from ringlog.storage.reader import FrameRun, LogHighWatermark, TopicReader
from ringlog.storage.recovery import FileScan, holds_marks
from ringlog.storage.snapshot import decode_snapshot
from ringlog.supervision.identity import EngineIdentity
from ringlog.tags import TagMatch
from ringlog.testing.shard_world import DATA, SHM
from ringlog.tier.verify_copy import verify_data_part
from ringlog.verify.directory import Verification, combine_reports, verify_directory, verify_path
from ringlog.verify.findings import DAMAGE, FileReport
from ringlog.verify.log_order import check_wal_order
from ringlog.verify.snapshot_decoder import snapshots_in_force

NO_MARK = LogHighWatermark(1 << 62, 0)
View = tuple[Any, ...]
"""What the engine's code makes of a file; ("whole", …) when nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one damage. `wrong` is empty when every promise held."""

    view: View
    wrong: str = ""


@dataclass(slots=True)
class Bench:
    """One specimen, sound; `judge` damages it for a moment."""

    specimen: Specimen
    root: Path
    """A real directory of its own, for the verifier."""
    truth: Answers = field(init=False)
    """What an engine answers from it after a reboot."""
    truth_on_board: Answers = field(init=False)
    """What successors of killed shards answer."""
    asked: dict[tuple[str, View], str] = field(default_factory=dict)
    """What an engine answered wrongly under each view of each file; empty = nothing."""
    _data_dir: str = field(init=False)
    _cold_dir: str = field(init=False)
    _disk: Any = field(init=False)
    _located: dict[str, list[m.Located]] = field(default_factory=dict)
    _units: dict[str, str] = field(default_factory=dict)
    _reports: dict[str, bytes] = field(default_factory=dict)
    _whole: dict[str, View] = field(default_factory=dict)
    _logs: dict[str, FileReport] = field(default_factory=dict)
    """Sound ones, and the registers of their streams, to hold a damaged one against; what the verifier says
    of them is cleared each time."""
    _fds: dict[str, int] = field(default_factory=dict)
    _starts: dict[str, list[int]] = field(default_factory=dict)
    """Offsets of the frames of each log."""
    _owners: dict[str, list[int]] = field(default_factory=dict)
    """Their topics; 0 for marks."""
    _changed_at: int = 0
    """Where the one byte lies in which the damaged file differs; 0 = more do."""
    _snapshots: list[FileReport] = field(default_factory=list)
    _remarks: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._data_dir, self._cold_dir = (str(self.root / top[1:]) for top in (DATA, COLD))
        self.truth = ask(self.specimen, self.specimen.files)
        self.truth_on_board = ask(self.specimen, self.specimen.files, keeps_board=True)
        assert self.truth.refused is None, self.truth.refused
        assert self.truth_on_board.refused is None, self.truth_on_board.refused
        assert all(topic.records and not topic.damage for topic in self.truth.topics.values())
        self._disk = ImageDisk(self.specimen.files, self.specimen.directories)
        for path, data in self.specimen.files.items():
            self._real(path).parent.mkdir(parents=True, exist_ok=True)
            self._real(path).write_bytes(data)
            self._fds[path] = os.open(self._real(path), os.O_RDWR)
            self._units[path] = unit_of(path)
            if path.endswith(".log"):
                batch = frames.scan(data[: len(data) & ~7], WAL_HEADER_BYTES)
                self._starts[path] = batch.offsets.tolist()
                self._owners[path] = batch.words[:, W_TOPIC].tolist()
        for topic in self.truth.topics.values():
            located = topic.located
            assert located is not None
            for extent in located.extents:
                one = m.Located(
                    **{n: getattr(located, n) for n in located.__struct_fields__} | {"extents": [extent]}
                )
                path = f"{COLD if extent.tier == m.TIER_COLD else DATA}/{extent.path}"
                self._located.setdefault(path, []).append(one)
        for unit in set(self._units.values()):
            self._reports[unit] = pickle.dumps(self._verified(unit))
        self._snapshots = snapshots_in_force(
            [pickle.loads(data) for each, data in self._reports.items() if each.startswith("meta/snapshot")]
        )
        for each, data in self._reports.items():
            if each.endswith(".log") or each.startswith("meta/log-"):
                self._logs[each] = pickle.loads(data)
                assert not self._logs[each].is_damaged
        sound = self._together({})
        assert not sound.is_damaged, sound.findings
        self._remarks = set(sound.findings)
        for path in self.specimen.files:
            self._whole[path] = self._view(path, self.specimen.files[path])

    def close(self) -> None:
        """Let go of the real files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    # -- one damage -------------------------------------------------------------------------------------

    def judge(self, path: str, damaged: bytes, *, at: int = 0, is_meaningless: bool = False) -> Verdict:
        """What every reader makes of this file with these bytes, which differ at `at` alone (0 = anywhere).

        `is_meaningless`: by docs/reference/format.md nobody has to notice.
        """
        self._changed_at = at
        view = self._view(path, damaged)
        self._changed_at = 0
        is_noticed = view != self._whole[path]
        wrong = ""
        if is_noticed:
            wrong = _believed(path, view) or self._ask(path, damaged, view)
        if not wrong and not is_meaningless and not self._verifier_notices(path, damaged):
            wrong = f"the offline verifier says nothing of {path}"
        return Verdict(view, wrong)

    def judge_all(
        self, files: dict[str, bytes], damaged: set[str], *, keeps_board: bool = False,
        is_quiet: bool = False, is_kept: bool = False, is_loss: bool = False,
    ) -> str:  # fmt: skip
        """What is wrong with what an engine and the verifier say of these files instead; empty = nothing.

        `damaged` are those that differ. `is_quiet`: nobody but an engine can know. `is_kept`: an engine may
        not change or remove them. `is_loss`: a remark is not enough, the verification must fail.
        """
        answers = ask(self.specimen, files, keeps_board=keeps_board, watched=damaged)
        wrong = compare(self.truth_on_board if keeps_board else self.truth, answers, damaged)
        if not wrong and is_kept and any(answers.left[path] != files[path] for path in damaged):
            wrong = f"an engine that does not understand {sorted(damaged)} changed it"
        if wrong or is_quiet:
            return wrong
        self._lay(files, {*damaged, *(set(files) ^ set(self.specimen.files))})
        try:
            found = verify_directory(self._data_dir, jobs=1, cold_dir=self._cold_dir)
        finally:
            self._lay(self.specimen.files, {*damaged, *(set(files) ^ set(self.specimen.files))})
        units = {unit_of(path) for path in damaged}
        new = [each for each in found.findings if each not in self._remarks]
        if any(each.severity == DAMAGE for each in new):
            return ""  # of this file, or the one beside it says what is missing
        if is_loss:
            return f"the offline verifier does not fail over the loss of {sorted(units)}"
        if any(each.path in units or each.path == "." or any(u in each.what for u in units) for each in new):
            return ""
        return f"the offline verifier says nothing of {sorted(units)}"

    def judge_end(self, files: dict[str, bytes], damaged: set[str]) -> str:
        """The same where nothing is left that knows how far a stream reached: a topic may end earlier."""
        found = ask(self.specimen, files)
        if found.refused is not None:
            return compare(self.truth, found, damaged)
        for name, sound in self.truth.topics.items():
            records = found.topics[name].records
            if records != sound.records[: len(records)] and not found.topics[name].damage:
                return f"topic {name}: what is left is not a beginning of what there was"
        return ""

    def _lay(self, files: dict[str, bytes], paths: set[str]) -> None:
        for path in paths:
            real = self._real(path)
            if path in files:
                real.parent.mkdir(parents=True, exist_ok=True)
                real.write_bytes(files[path])
                if path in self._fds:  # it may have been away, and be another file under its name
                    os.close(self._fds[path])
                    self._fds[path] = os.open(real, os.O_RDWR)
            else:
                real.unlink(missing_ok=True)

    def _ask(self, path: str, damaged: bytes, view: View) -> str:
        known = self.asked.get((path, view))
        if known is None:
            files = {**self.specimen.files, path: damaged}
            known = self.asked[path, view] = compare(self.truth, ask(self.specimen, files), {path})
        return known

    def _verifier_notices(self, path: str, damaged: bytes) -> bool:
        unit = self._units[path]
        self._put(path, damaged)
        try:
            report = self._verified(unit)
        finally:
            self._put(path, self.specimen.files[path])
        if report.kind in {"wal", "register"} and not report.is_damaged:
            others = [each for name, each in self._logs.items() if name != unit]
            check_wal_order([*others, report], self._snapshots)
            for each in others:
                each.findings.clear()
        if report.is_damaged or (report.kind == "register" and report.findings):
            return True
        found = self._together({unit: report})
        return any(each not in self._remarks and each.path in {unit, "."} for each in found.findings)

    def _put(self, path: str, data: bytes) -> None:
        """Let the real file have these contents; written where it lies."""
        fd = self._fds[path]
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))

    def _verified(self, unit: str) -> FileReport:
        return verify_path(self._data_dir, unit, cold_dir=self._cold_dir)

    def _together(self, changed: dict[str, FileReport]) -> Verification:
        reports = [changed.get(unit) or pickle.loads(data) for unit, data in self._reports.items()]
        found = Verification(files=reports)
        combine_reports(found)
        return found

    def _real(self, path: str) -> Path:
        return self.root / path[1:]

    # -- the engine's view of one file --------------------------------------------------------------------

    def _view(self, path: str, data: bytes) -> View:
        self._disk.files[path] = data
        try:
            return view_of(path)(self, path, data)
        except (CorruptData, StartRefused) as e:
            return type(e).__name__, e.message, str(e.detail.get("offset", ""))
        finally:
            self._disk.files[path] = self.specimen.files[path]

    def view_log(self, path: str, data: bytes) -> View:
        """What recovery reads off a log file, and what readers do who were led there before it rotted."""
        if not header_verifies(data[:4096]):
            return "header", holds_marks(lambda at, size: data[at : at + size], len(data))
        scan = FileScan(
            decode_wal_header(data[:4096], path), len(data), lambda at, size: data[at : at + size]
        )
        seen = hashlib.blake2b(digest_size=8)
        for piece in scan.iter_chunks():
            seen.update(np.ascontiguousarray(piece.batch.words).tobytes())
        found: View = (scan.stop, scan.durable, scan.orderly, bool(scan.reason), seen.digest())
        if not scan.reason:
            found = (*found, data[scan.stop :].strip(b"\0") != b"")
        return ("log", *found, *self._read(path))

    def view_data(self, path: str, data: bytes) -> View:
        """Readers of the stretches that lead here, and the proof that moves and merges rest on."""
        number = int(path.rpartition(".")[0][-16:], 16)
        proof = "proven"
        try:
            verify_data_part(lambda start, stop: data[start:stop], path, number, len(data), lambda _: None)
        except CorruptData as e:
            proof = f"{e.message} {e.detail.get('offset', '')}"
        return ("data", proof, *self._read(path))

    def _read(self, path: str) -> Iterator[Any]:
        """What readers are handed who were led to this file: the bytes of the frames, or the damage."""
        data = self._disk.files[path]
        for located in self._located.get(path, ()):
            if not self._is_concerned(path, located, data):
                continue
            reader = TopicReader(
                located, max(located.extents[0].first_seq, located.earliest_seq) - 1, data_dir=DATA,
                shm_dir=SHM, marks=lambda _: NO_MARK, disk=self._disk, cold_dir=COLD,
            )  # fmt: skip
            seen = hashlib.blake2b(digest_size=8)
            said: Any = ""
            try:
                while isinstance(run := reader.next_run(located.head_seq), FrameRun):
                    for offset in run.batch.offsets.tolist():
                        stop = (
                            offset + 4 + int.from_bytes(run.buffer[offset : offset + 4].tobytes(), "little")
                        )
                        seen.update(run.buffer[offset:stop])
            except CorruptData as e:
                said = e.message, e.detail.get("offset", 0)
            finally:
                reader.close()
            yield located.topic, reader.cursor, seen.digest(), said

    def _is_concerned(self, path: str, located: m.Located, data: bytes) -> bool:
        """Does a reader of this topic see anything else of a log than before? Not of another's body:
        it goes by the headers, and looks into no body but its own.
        """
        sound = self.specimen.files[path]
        at = self._changed_at
        if not at or not path.endswith(".log") or data is sound:
            return True
        place = bisect_right(self._starts[path], at) - 1
        if place < 0 or at - self._starts[path][place] < HEADER_BYTES:
            return True
        return self._owners[path][place] in {located.topic_id, 0}

    def view_index(self, path: str, _data: bytes) -> View:
        """Everything that is asked of an index, its tags and its marks."""
        root = COLD if path.startswith(COLD) else DATA
        stem = path.rpartition(".")[0].removeprefix(root + "/")
        segment = Segment.open(self._disk, root, stem)
        try:
            seen = hashlib.blake2b(segment.topics.tobytes() + segment.entries.tobytes(), digest_size=8)
            for row, topic_id in enumerate(segment.topics["topic_id"].tolist()):
                for each in segment.positions(row, 0, 1 << 62):
                    seen.update(each.tobytes())
                seen.update(repr((segment.expired(row, 1 << 62), segment.deleted(row).to_array())).encode())
                for tag in segment.tags_of(topic_id):
                    seen.update(tag + segment.tagged(topic_id, TagMatch(tag)).tobytes())
            return "index", seen.digest(), segment.bad_marks
        except DiskError as e:
            return "index", "unreadable", e.message
        finally:
            segment.close()

    def view_snapshot(self, path: str, data: bytes) -> View:
        """A snapshot is decoded whole or not at all."""
        found = decode_snapshot(data, path)
        return "snapshot", found.number, found.facts, bytes(found.rows), found.ids.tobytes()

    def view_register(self, path: str, data: bytes) -> View:
        """Which log file is the newest, and which ids were given out by then."""
        return "register", decode_register(data, path)

    def view_identity(self, _path: str, _data: bytes) -> View:
        """Who the directory is, and which numbers are next."""
        known = EngineIdentity.peek(self._disk, DATA)
        if known is None:
            return "identity", "none"
        return "identity", known.engine_id, known.next_incarnation, known.shm_dir


def _believed(path: str, view: View) -> str:
    """Everything in an index and in tags lies under a checksum: another answer is one that was not looked at.

    Deletion marks have none; what else is no mark is counted, and does not delete.
    """
    is_answer = view[0] == "index" and view[1] != "unreadable"
    return f"the engine believes the damaged {path}" if is_answer and not path.endswith(DEL) else ""


def view_of(path: str) -> Callable[[Bench, str, bytes], View]:
    """Which reader of the engine's a file belongs to."""
    if path.endswith(".log"):
        return Bench.view_log
    if path.endswith(DATA_SUFFIX):
        return Bench.view_data
    if path.endswith((IDX, TAGS, DEL)):
        return Bench.view_index
    if "/log-" in path:
        return Bench.view_register
    return Bench.view_identity if path.endswith("/engine") else Bench.view_snapshot


def unit_of(path: str) -> str:
    """What the verifier calls the thing this file is a part of."""
    name = path.removeprefix(DATA + "/").removeprefix(COLD + "/")
    return name.rpartition(".")[0] if name.endswith((DATA_SUFFIX, IDX, TAGS, DEL)) else name
