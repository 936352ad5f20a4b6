"""Losses: records that no readable file holds, those of them that can be salvaged, and where the rest is
announced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ringlog.cli.repair.plan import Key, Lost, RepairPlan, intersection, log_file_id
from ringlog.segment.salvage import SalvagedSlice, SalvagedTopic
from ringlog.verify.directory import is_absorbed
from ringlog.verify.findings import Range, merge_ranges, subtract_ranges
from ringlog.verify.frame_decoder import VerifyError, record_ranges
from ringlog.verify.log_order import in_replay_order
from ringlog.verify.repair import DamagedSpan, read_partial_log
from ringlog.verify.segment_decoder import frames_in, salts_of
from ringlog.verify.snapshot_decoder import authoritative_snapshot


def find_lost(plan: RepairPlan) -> None:
    """Compute which seqs no readable file holds, which can be salvaged, and where to announce the rest."""
    plan.salvaged, plan.lost = {}, {}
    for partial_log in plan.repaired_logs.values():
        for damaged_span in partial_log.damaged_spans:
            damaged_span.lost = dict(damaged_span.known)
    for topic in plan.found.histories.live_topics():
        key = (topic.topic_id, topic.epoch)
        served = merge_ranges(_served(plan, key))
        topic.stored = list(served)
        known = merge_ranges(
            [span for damaged in plan.damaged_spans() for span in damaged.known.get(key, ())]
        )
        head = topic.coverage().head
        beyond = [span for span in subtract_ranges(known, served) if span[0] > head]
        bound = plan.max_unknown_records(topic.topic_id)
        beyond = merge_ranges([*beyond, (head + 1, head + bound)]) if bound else beyond
        if not topic.coverage().gaps and not beyond:
            continue
        wanted = subtract_ranges([(topic.floor, max([head, *[span[1] for span in beyond]]))], served)
        pieces = _found_elsewhere(plan, key, subtract_ranges(wanted, merge_ranges(topic.lost)))
        if pieces:
            plan.salvaged[key] = SalvagedTopic(pieces, topic.removed)
            topic.stored += [(piece.first, piece.last) for piece in pieces]
        gaps = merge_ranges([*topic.coverage().gaps, *subtract_ranges(beyond, merge_ranges(topic.stored))])
        if gaps:
            plan.lost[key] = gaps
    _place_announcements(plan)


def _served(plan: RepairPlan, key: Key) -> Iterator[Range]:
    """Yield the seqs that an engine will read from the retained files."""
    for report in plan.found.files:
        if report.path not in plan.quarantined:
            yield from report.served.get(key, ())
    for path, partial_log in plan.repaired_logs.items():
        if is_absorbed(plan.snapshots, log_file_id(path), key[0]):
            continue
        for seen in partial_log.frames:
            for topic_id, epoch, base_seq, count in record_ranges(seen.frame):
                if (topic_id, epoch) == key:
                    yield base_seq, base_seq + count - 1


def _found_elsewhere(plan: RepairPlan, key: Key, wanted: list[Range]) -> list[SalvagedSlice]:
    """Return frames, or parts of frames, with the wanted seqs: ascending, without duplicates."""
    if plan.unread_frames is None:
        plan.unread_frames = {}
        for owner, piece in _unread(plan):
            plan.unread_frames.setdefault(owner, []).append(piece)
    found = []
    for piece in plan.unread_frames.get(key, ()):
        for first, last in intersection([(piece.first, piece.last)], wanted):
            found.append(piece._replace(first=first, last=last))
        wanted = subtract_ranges(wanted, [(piece.first, piece.last)])
    return sorted(found)


def _unread(plan: RepairPlan) -> Iterator[tuple[Key, SalvagedSlice]]:
    """Yield complete frames of damaged segments, of cold copies, and of log files that are not replayed."""
    for report in plan.found.files:
        is_segment = report.path.startswith(("topics/", "packs/"))
        is_unread = report.path in plan.quarantined or report.extra.get("is_copy")
        if is_segment and is_unread and not report.extra.get("is_foreign"):
            yield from _in_segment(plan, report.path)
    for report in plan.found.files:
        is_unread = report.served != report.stored or report.path in plan.quarantined
        if report.kind == "wal" and is_unread and not report.extra.get("is_foreign"):
            yield from _in_log(plan.root / report.path)


def _in_segment(plan: RepairPlan, stem: str) -> Iterator[tuple[Key, SalvagedSlice]]:
    places = [plan.root] if plan.cold is None else [plan.root, plan.cold]
    salts = [salt for place in places for salt in salts_of(str(place / stem))]
    for place in places:
        path = place / f"{stem}.data"
        if not path.exists():
            continue
        data = path.read_bytes()
        for salt in dict.fromkeys(salts):
            for offset, frame in frames_in(data, salt):
                piece = SalvagedSlice(
                    frame.base_seq, frame.base_seq + frame.count - 1, str(path), offset, frame.total, salt
                )
                yield (frame.topic_id, frame.epoch), piece


def _in_log(path: Path) -> Iterator[tuple[Key, SalvagedSlice]]:
    try:
        partial_log = read_partial_log(path.read_bytes())
    except (VerifyError, OSError):
        return
    for seen in partial_log.frames:
        for topic_id, epoch, base_seq, count in record_ranges(seen.frame):
            last = base_seq + count - 1
            piece = SalvagedSlice(
                base_seq, last, str(path), seen.offset, seen.frame.total, partial_log.header.salt
            )  # fmt: skip
            yield (topic_id, epoch), piece


def _place_announcements(plan: RepairPlan) -> None:
    """Assign each lost range that no snapshot announces to a damaged span.

    It is the last span before the topic's next record in the log. Ranges without a next record go to the last
    span of all."""
    left = {key: subtract_ranges(ranges, _in_snapshot(plan, key)) for key, ranges in plan.lost.items()}
    for damaged_span in plan.damaged_spans():
        announced = {
            key: intersection(ranges, left.get(key, [])) for key, ranges in damaged_span.known.items()
        }
        damaged_span.lost = {key: ranges for key, ranges in announced.items() if ranges}
        for key, ranges in damaged_span.lost.items():
            left[key] = subtract_ranges(left[key], ranges)
    spans_by_file: list[tuple[int, DamagedSpan]] = []
    reports = {report.path: report for report in in_replay_order(plan.found.files)}
    for path in sorted({*reports, *plan.repaired_logs}, key=log_file_id):
        partial_log = plan.repaired_logs.get(path)
        if partial_log is None:
            for key, ranges in reports[path].served.items():
                _announce(plan, left, key, ranges[-1][0], spans_by_file)
            continue
        coming = list(partial_log.damaged_spans)
        for seen in partial_log.frames:
            while coming and coming[0].start < seen.offset:
                spans_by_file.append((log_file_id(path), coming.pop(0)))
            for topic_id, epoch, base_seq, _ in record_ranges(seen.frame):
                _announce(plan, left, (topic_id, epoch), base_seq, spans_by_file)
        spans_by_file += [(log_file_id(path), damaged_span) for damaged_span in coming]
    for key in left:
        _announce(plan, left, key, 1 << 63, spans_by_file)


def _in_snapshot(plan: RepairPlan, key: Key) -> list[Range]:
    """Return the seqs that the snapshot of a topic accounts for."""
    last_word = authoritative_snapshot(plan.snapshots, key[0])
    rows = last_word.extra["topics"] if last_word is not None else ()
    return [(1, row.head) for row in rows if (row.topic_id, row.epoch) == key and row.head]


def _announce(
    plan: RepairPlan, left: Lost, key: Key, before: int, spans_by_file: list[tuple[int, DamagedSpan]]
) -> None:
    """Assign ranges that end below `before` to a span that an engine reads before that record."""
    ready = [span for span in left.get(key, ()) if span[1] < before]
    if not ready:
        return
    for file_id, damaged_span in reversed(spans_by_file):
        if not is_absorbed(plan.snapshots, file_id, key[0]):
            damaged_span.lost[key] = merge_ranges([*damaged_span.lost.get(key, []), *ready])
            left[key] = [span for span in left[key] if span[1] >= before]
            return
