"""A test bench: damages one file of the specimen and checks every reader of that file.

Three readers judge each damage. The engine's own code reads the damaged file in memory. The offline verifier
reads it from a real directory. An engine that is started on the damaged directory answers all reads.

A start takes a hundred times longer than the other two. It runs once for each distinct *view*: the result
that the engine's code gets from the file. Recovery and readers depend on the file's bytes only through the
view.
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
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.layout import decode_wal_header, header_verifies
from ringlog.storage.log_register import decode_register
from ringlog.storage.reader import TopicReader
from ringlog.storage.recovery import FileScan, holds_marks
from ringlog.storage.snapshot import decode_snapshot
from ringlog.supervision.identity import EngineIdentity
from ringlog.tags import TagMatch
from ringlog.tier.verify_copy import verify_data_part
from ringlog.verify.directory import Verification, combine_reports, verify_directory, verify_path
from ringlog.verify.findings import DAMAGE, FileReport
from ringlog.verify.log_order import check_wal_order
from ringlog.verify.snapshot_decoder import snapshots_in_force
from tests.support.shard_world import DATA, SHM

NO_MARK = LogHighWatermark(1 << 62, 0)
View = tuple[Any, ...]
"""Result of the engine's code for a file: the kind of reader and its result, or the error."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one damage. `wrong` is empty if every guarantee held."""

    view: View
    wrong: str = ""


@dataclass(slots=True)
class Bench:
    """One undamaged specimen. `judge` damages it temporarily."""

    specimen: Specimen
    root: Path
    """Real directory with a copy of the specimen, for the verifier."""
    truth: Answers = field(init=False)
    """Answers of an engine after a reboot, without damage."""
    truth_on_board: Answers = field(init=False)
    """Answers of successors of killed shards, without damage."""
    asked: dict[tuple[str, View], str] = field(default_factory=dict)
    """Cache by path and view: a description of the problem in the engine's answers, or an empty string."""
    _data_dir: str = field(init=False)
    _cold_dir: str = field(init=False)
    _disk: Any = field(init=False)
    _located: dict[str, list[m.Located]] = field(default_factory=dict)
    _units: dict[str, str] = field(default_factory=dict)
    _reports: dict[str, bytes] = field(default_factory=dict)
    _whole: dict[str, View] = field(default_factory=dict)
    _logs: dict[str, FileReport] = field(default_factory=dict)
    """Reports of undamaged log files and registers. They are checked together with a damaged file, and their
    findings are cleared after each check."""
    _fds: dict[str, int] = field(default_factory=dict)
    _starts: dict[str, list[int]] = field(default_factory=dict)
    """Offsets of the frames of each log."""
    _owners: dict[str, list[int]] = field(default_factory=dict)
    """Topic ids of these frames; 0 for marks."""
    _changed_at: int = 0
    """Offset of the only changed byte of the damaged file; 0 if more bytes changed."""
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
        sound = self._verification_with({})
        assert not sound.is_damaged, sound.findings
        self._remarks = set(sound.findings)
        for path in self.specimen.files:
            self._whole[path] = self._view(path, self.specimen.files[path])

    def close(self) -> None:
        """Close the real files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    # -- one damage -------------------------------------------------------------------------------------

    def judge(self, path: str, damaged: bytes, *, at: int = 0, is_meaningless: bool = False) -> Verdict:
        """Judge this file with these bytes by all readers.

        `at` is the offset of the only changed byte (0: anywhere). `is_meaningless`: docs/reference/format.md
        does not require detection.
        """
        self._changed_at = at
        view = self._view(path, damaged)
        self._changed_at = 0
        is_noticed = view != self._whole[path]
        wrong = ""
        if is_noticed:
            wrong = _believed(path, view) or self._ask(path, damaged, view)
        if not wrong and not is_meaningless and not self._verifier_notices(path, damaged):
            wrong = f"the offline verifier does not report {path}"
        return Verdict(view, wrong)

    def judge_all(
        self, files: dict[str, bytes], damaged: set[str], *, keeps_board: bool = False,
        is_quiet: bool = False, is_kept: bool = False, is_loss: bool = False,
    ) -> str:  # fmt: skip
        """Judge these files by an engine and the verifier; describe the problem, or return an empty string.

        `damaged` are the changed paths. `is_quiet`: only an engine can detect the damage. `is_kept`: an
        engine must not change or remove the files. `is_loss`: the verification must fail; a remark is not
        enough.
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
            return ""  # damage in this file, or in a related file that reports the missing part
        if is_loss:
            return f"the offline verifier reports no damage for the loss of {sorted(units)}"
        if any(each.path in units or each.path == "." or any(u in each.what for u in units) for each in new):
            return ""
        return f"the offline verifier does not report {sorted(units)}"

    def judge_end(self, files: dict[str, bytes], damaged: set[str]) -> str:
        """Judge these files if nothing states any more where a stream ended.

        A topic may end earlier, but the remaining records must be a prefix of the original ones.
        """
        found = ask(self.specimen, files)
        if found.refused is not None:
            return compare(self.truth, found, damaged)
        for name, sound in self.truth.topics.items():
            records = found.topics[name].records
            if records != sound.records[: len(records)] and not found.topics[name].damage:
                return f"topic {name}: the remaining records are not a prefix of the original ones"
        return ""

    def _lay(self, files: dict[str, bytes], paths: set[str]) -> None:
        for path in paths:
            real = self._real(path)
            if path in files:
                real.parent.mkdir(parents=True, exist_ok=True)
                real.write_bytes(files[path])
                if path in self._fds:  # it may have been removed and created again, as another inode
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
        found = self._verification_with({unit: report})
        return any(each not in self._remarks and each.path in {unit, "."} for each in found.findings)

    def _put(self, path: str, data: bytes) -> None:
        """Write these contents into the existing real file."""
        fd = self._fds[path]
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))

    def _verified(self, unit: str) -> FileReport:
        return verify_path(self._data_dir, unit, cold_dir=self._cold_dir)

    def _verification_with(self, changed: dict[str, FileReport]) -> Verification:
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
        """Return the result of recovery from a log file, and of readers with an extent in it."""
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
        """Return the result of readers of a data part, and of its verification before a move."""
        number = int(path.rpartition(".")[0][-16:], 16)
        proof = "proven"
        try:
            verify_data_part(lambda start, stop: data[start:stop], path, number, len(data), lambda _: None)
        except CorruptData as e:
            proof = f"{e.message} {e.detail.get('offset', '')}"
        return ("data", proof, *self._read(path))

    def _read(self, path: str) -> Iterator[Any]:
        """Yield the results of readers with an extent in this file: a digest of the frames, or the damage."""
        data = self._disk.files[path]
        for located in self._located.get(path, ()):
            if not self._is_concerned(path, located, data):
                continue
            reader = TopicReader(
                located, max(located.extents[0].first_seq, located.earliest_seq) - 1, data_dir=DATA,
                shm_dir=SHM, read_watermark=lambda _: NO_MARK, disk=self._disk, cold_dir=COLD,
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
        """Return whether the changed byte can affect a reader of this topic.

        A reader of a log reads all frame headers, but only the bodies of its own topic.
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
        """Return all facts that the engine reads from an index, its tags and its marks."""
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
        """Return the contents of a snapshot, which decodes completely or not at all."""
        found = decode_snapshot(data, path)
        return "snapshot", found.number, found.facts, bytes(found.rows), found.ids.tobytes()

    def view_register(self, path: str, data: bytes) -> View:
        """Return the newest log file and the last assigned ids that a register states."""
        return "register", decode_register(data, path)

    def view_identity(self, _path: str, _data: bytes) -> View:
        """Return the engine's id, its next incarnation and its shared-memory directory."""
        known = EngineIdentity.peek(self._disk, DATA)
        if known is None:
            return "identity", "none"
        return "identity", known.engine_id, known.next_incarnation, known.shm_dir


def _believed(path: str, view: View) -> str:
    """Describe the problem if the engine accepted a damaged file.

    Index and tags are covered by checksums, so a different answer means that a checksum was not verified.
    Deletion marks have no checksum. A byte that is not a valid mark is counted and deletes nothing.
    """
    is_answer = view[0] == "index" and view[1] != "unreadable"
    return f"the engine believes the damaged {path}" if is_answer and not path.endswith(DEL) else ""


def view_of(path: str) -> Callable[[Bench, str, bytes], View]:
    """Return the method that reads a file as the engine does."""
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
    """Return the verifier's name for the unit that contains this file: a segment's stem, or the file."""
    name = path.removeprefix(DATA + "/").removeprefix(COLD + "/")
    return name.rpartition(".")[0] if name.endswith((DATA_SUFFIX, IDX, TAGS, DEL)) else name
