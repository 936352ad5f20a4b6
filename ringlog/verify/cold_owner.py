"""Check that a directory is the cold tier of a data directory, written from docs/reference/format.md only.

Segments of two engines may have the same names. A mount point without its volume contains none.
"""

from __future__ import annotations

import re
from pathlib import Path

from ringlog.errors import UsageError
from ringlog.verify.identity_decoder import verify_identity

_ID = re.compile(rb"[0-9a-f]{32}")


def require_own_cold_tier(data_dir: Path, cold_dir: str) -> None:
    """Raise UsageError if `cold_dir` exists and is not the cold tier of the engine of `data_dir`.

    Its file `engine` names another engine; or it has no such file, although the data directory says that its
    cold tier has one. A copy of a cold tier may lack the file.
    """
    identity = _read(data_dir / "meta" / "engine")
    engine_id = verify_identity("meta/engine", identity).header.get("engine_id", "")
    if not cold_dir or not Path(cold_dir).is_dir() or not engine_id:
        return
    owner = _read(Path(cold_dir) / "engine")
    if _ID.fullmatch(owner) and owner.decode() != engine_id:
        raise UsageError(
            "the cold tier belongs to another engine: name the directory of this one", cold_dir=cold_dir,
            owner=owner.decode(), engine_id=engine_id,
        )  # fmt: skip
    if not owner and _read(data_dir / "meta" / "cold-owner").endswith(b" confirmed"):
        raise UsageError(
            "the cold tier lacks the file `engine`: mount its volume, or copy the file too if this is a copy",
            cold_dir=cold_dir, engine_id=engine_id,
        )  # fmt: skip


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
