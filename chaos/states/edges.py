"""Images that no history reaches: frames cut at every byte, leftovers, files that are too long.

Each image is an image of a recorded history with one edited file. It is judged like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from chaos.rigs.judge import KILL, POWER_LOSS, CrashKind, Seen
from chaos.states.explore import cuts_of, record
from chaos.states.images import Image
from chaos.states.judge import Depth, judge
from chaos.states.workload import Facts
from ringlog.drill.checks import GuaranteeBroken
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.storage.layout import decode_wal_header, parse_wal_name, wal_name
from ringlog.testing import disk as d
from ringlog.verify.wal_decoder import WalFrameWalk

STREAM = "/data/wal/shard-00"
EDGES = "edges"
"""Prefix of the name of such a case: `edges/ROW/NUMBER`."""
OLDER_SALTS = 1 << 16
"""Start of the salts of older files. A salt is never used twice."""
LONGER_BYTES = (8, 512, 4_096, 64 << 10)

Edge = tuple[Image, Facts, CrashKind]


def edges(row: str) -> Iterator[Edge]:
    """Return all cases of one row of the fault matrix, in a fixed order."""
    return ROWS[row]()


def judge_edge(row: str, edge: Edge, depth: Depth) -> None:
    """Judge one case. Raises GuaranteeBroken."""
    image, facts, how = edge
    seen = judge(image, facts, how, depth=depth)
    if row == "RF-66":
        _require_loss(seen, facts)


def _require_loss(seen: dict[str, Seen], facts: Facts) -> None:
    """Raise GuaranteeBroken unless acknowledged records were lost.

    The judge has checked that the loss is announced.
    """
    mine = [sent for sent in facts.model.frames if sent.acked_at and sent.topic == "d"]
    if not any(seq not in seen["d"].records for sent in mine for seq in sent.seqs):
        raise GuaranteeBroken("precondition failed: no acknowledged record was lost")


def at_end(*steps: str, salts: int = 0) -> tuple[Image, Image, Facts]:
    """Return (the image after a kill, the image with synced data only, facts) at the end of a history."""
    history, tree = record(steps, salts)
    *_, (_, facts) = cuts_of(history, tree)
    return tree.as_killed(), tree.as_synced(), facts


def _cut_at_every_byte() -> Iterator[Edge]:
    """Yield images in which the write of a frame of several records was cut after each byte (RF-60)."""
    for steps in (("delete_seq",), ("restart", "delete_seq")):
        history, tree = record(steps)
        before = tree.as_killed()
        for number, facts in cuts_of(history, tree):
            done = history.operations[number]
            if isinstance(done, d.Write) and done.path.startswith(STREAM) and _is_of_many(facts):
                break
            before = tree.as_killed()
        assert isinstance(done, d.Write)
        data = before.files[done.path]
        for size in range(len(done.data) + 1):
            torn = data[: done.offset] + done.data[:size] + data[done.offset + size :]
            yield _with(before, done.path, torn), facts, POWER_LOSS


def _is_of_many(facts: Facts) -> bool:
    """Return whether frames are unacknowledged and the first of them has several records."""
    under_way = [sent for sent in facts.model.frames if not sent.acked_at]
    return bool(under_way) and len(under_way[0].payloads) > 1 and under_way[0].topic == "f"


def _leftover() -> Iterator[Edge]:
    """Yield images whose newest log file was only partly created by a start or a rotation (RF-68)."""
    for steps in (("append",), ("append_many",), ("rotate",), ("seal", "append"), ("restart", "append")):
        image, _, facts = at_end(*steps)
        newest = _logs(image)[-1]
        header = decode_wal_header(image.files[newest], newest)
        made = dataclasses.replace(header, incarnation=header.incarnation + 1, n=0, prev_file=0, prev_stop=0)
        whole = dataclasses.replace(made, prev_seal=0).encode().ljust(WAL_HEADER_BYTES, b"\0")
        bodies = (
            b"",
            bytes(512),
            bytes(WAL_HEADER_BYTES),
            bytes(1 << 16),
            whole[:512],
            whole,
            whole + bytes(1 << 16),
        )
        for incarnation, n in ((header.incarnation, header.n + 5), (header.incarnation + 1, 0)):
            for body in bodies:
                path = f"{STREAM}/{wal_name(incarnation, n)}"
                for how in (KILL, POWER_LOSS):
                    if body[:8] != whole[:8] or n == 0:
                        yield Image(image.directories, {**image.files, path: body}), facts, how


def _longer() -> Iterator[Edge]:
    """Yield images in which zeros or blocks of an older file follow the last frame (RF-69)."""
    for steps in (("append",), ("append_many",), ("rotate", "restart", "append"), ("restart", "append_many")):
        image, _, facts = at_end(*steps)
        newest = _logs(image)[-1]
        data = image.files[newest]
        stop = _stop(newest, data)
        for size in LONGER_BYTES:
            yield _with(image, newest, data + bytes(size)), facts, POWER_LOSS
        for older in _older_lives():
            for at in (stop, -(-stop // 512) * 512, -(-stop // 4_096) * 4_096):
                stale = data[:at] + older + data[at + len(older) :]
                yield _with(image, newest, stale), facts, POWER_LOSS
                yield _with(image, newest, stale[: at + len(older)]), facts, POWER_LOSS


def _older_lives() -> Iterator[bytes]:
    """Yield frames of another file: all frames, the last 512 bytes, and header with all frames."""
    image, _, _ = at_end("create", "append", "append_many", "restart", salts=OLDER_SALTS)
    for path in _logs(image)[:-1]:
        data = image.files[path]
        stop = _stop(path, data)
        if stop > WAL_HEADER_BYTES:
            yield data[WAL_HEADER_BYTES:stop]
            yield data[max(WAL_HEADER_BYTES, stop - 512) : stop]
            yield data[:stop]


def _lost_tails() -> Iterator[Edge]:
    """Yield images after a power loss that took acknowledged records of class `disk` (RF-66)."""
    for steps in (
        ("append_many",), ("append_disk", "append_disk"), ("append_disk_many", "append_disk"),
        ("append_disk", "idle", "append_disk_many"), ("append_many", "append_disk"),
        ("append_disk", "restart", "append_disk", "append_disk"),
        ("append_many", "rotate", "append_disk_many"),
        ("append_disk", "seal", "append_disk"), ("append_many", "seal", "relocate", "append_disk_many"),
        ("delete_topic", "append_disk", "append_disk_many"),
        ("append_disk_many", "delete_seq", "append_disk"),
    ):  # fmt: skip
        _, synced, facts = at_end(*steps)
        assert not all(each.is_fsync for each in facts.model.frames)
        yield synced, facts, POWER_LOSS


def _logs(image: Image) -> list[str]:
    names = [path.rpartition("/")[2] for path in image.files if path.startswith(f"{STREAM}/")]
    known = sorted((parsed, name) for name in names if (parsed := parse_wal_name(name)) is not None)
    used = [name for _, name in known if any(image.files[f"{STREAM}/{name}"][:8])]
    return [f"{STREAM}/{name}" for name in used]


def _stop(path: str, data: bytes) -> int:
    walk = WalFrameWalk(data, decode_wal_header(data, path).salt)
    for _ in walk.frames():
        continue
    return walk.stop


def _with(image: Image, path: str, data: bytes) -> Image:
    return Image(image.directories, {**image.files, path: data})


ROWS: dict[str, Callable[[], Iterator[Edge]]] = {
    "RF-60": _cut_at_every_byte,
    "RF-66": _lost_tails,
    "RF-68": _leftover,
    "RF-69": _longer,
}
