"""The offline verifier reads files of every kind by their path, as `ringlog verify` does (RF-114).

The first byte selects the kind of file. The rest is its contents, prepared as by the other targets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from chaos.fuzz import fuzz_segment, fuzz_snapshot, fuzz_wal
from chaos.fuzz.scratch import own_directory
from ringlog.verify.directory import verify_path
from ringlog.verify.findings import FileReport

MAX_LEN = 5_200
SHARE = 1.5
KINDS = 6
_there: dict[Path, bytes] = {}
"""Contents of the files on disk. Only files that differ from the previous input are written."""


def check(data: bytes) -> None:
    """Verify one file. Any bytes must give a report, with damage as findings; no exception may be raised."""
    kind, rest = (data[0] % KINDS, data[1:]) if data else (0, b"")
    root = _at()
    if kind == 0:
        path, whole = fuzz_wal.PATH, fuzz_wal.prepared(rest)
    elif kind == 1:
        path, whole = fuzz_snapshot.PATH, fuzz_snapshot.mended(rest)
    else:
        part = fuzz_segment.PARTS[kind - 2]
        how = rest[0] if rest else 0
        path, whole = fuzz_segment.STEM, fuzz_segment.mended(part, rest[1:], how)
        for each, good in fuzz_segment.GOOD.items():
            _write(root / f"{path}{each}", whole if each == part else good)
    if kind < 2:
        _write(root / path, whole)
    report = verify_path(str(root), path, is_deep=True)
    if not isinstance(report, FileReport):
        raise AssertionError(f"no report: {report!r}")


def _at() -> Path:
    root = own_directory("verify")
    for folder in ("wal/shard-00", "meta", "packs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    return root


def _write(path: Path, data: bytes) -> None:
    if _there.get(path) == data:
        return
    _there[path] = data
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    os.close(fd)


def seeds() -> Iterator[bytes]:
    """Yield the seeds of the targets for these kinds of files."""
    for seed in fuzz_wal.seeds():
        yield bytes([0]) + seed
    for seed in fuzz_snapshot.seeds():
        if seed[0] in {fuzz_snapshot.AS_IT_IS, fuzz_snapshot.MENDED}:
            yield bytes([1]) + seed[1:]
    for number, part in enumerate(fuzz_segment.PARTS):
        for how in (0, fuzz_segment.MEND_HEADER | fuzz_segment.MEND_CONTENTS):
            yield bytes([2 + number, how]) + fuzz_segment.GOOD[part]
