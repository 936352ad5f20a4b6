"""Independent decoder of `meta/engine`, written from docs/reference/format.md only."""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

from ringlog.verify.findings import FileReport

_ID = re.compile(r"[0-9a-f]{32}")
_FIELDS = {"engine_id", "next_incarnation", "shm_dir", "check"}


def verify_identity(path: str, data: bytes) -> FileReport:
    """Check the identity file by itself and return the report."""
    report = FileReport(path, "identity", bytes=len(data))
    try:
        facts: Any = json.loads(data)
    except ValueError as e:
        report.add_damage(f"is not JSON: {e}")
        return report
    wrong = _wrong(facts)
    if wrong:
        report.add_damage(wrong)
        return report
    report.header = {"engine_id": facts["engine_id"], "next_incarnation": facts["next_incarnation"]}
    if not facts.get("check"):
        report.add_remark("has no checksum: an engine older than checksums wrote it")
    return report


def _wrong(facts: Any) -> str:
    """Return what is wrong with the fields; empty if nothing is."""
    if not isinstance(facts, dict) or not set(facts) <= _FIELDS:
        return "is not a JSON object or has unknown fields"
    engine_id, number = facts.get("engine_id"), facts.get("next_incarnation")
    shm_dir, check = facts.get("shm_dir", ""), facts.get("check", "")
    if not isinstance(engine_id, str) or not _ID.fullmatch(engine_id):
        return "engine_id is invalid"
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return "next_incarnation is invalid"
    if not isinstance(shm_dir, str) or not isinstance(check, str):
        return "has fields of a wrong type"
    text = f"{engine_id} {number} {shm_dir}".encode(errors="surrogatepass")
    if check and check != xxhash.xxh3_64_hexdigest(text):
        return "checksum mismatch"
    return ""
