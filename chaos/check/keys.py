"""Check idempotency keys: for each key, the acks and the final read must have a linearization."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chaos.check.lin import FOREVER, Op, SearchTooLong, find_order, keyed_append
from ringlog.drill.journal import ROW, Outcome, Rows, What

COMPLAINTS_MAX = 5
KEY_VALUES = 0xFFFF << 48
"""Values of keyed records start here, far above those of clients."""


def check_keys(rows: Rows, topic: int) -> list[str]:
    """Return complaints about the keys of a topic, at most COMPLAINTS_MAX; [] if all histories are explained.

    A key whose search exceeds its limit is skipped.
    """
    mine = rows[rows["topic"] == topic]
    mine = mine[(mine["what"] != What.APPEND) | (mine["value"] >= KEY_VALUES)]
    finals = mine["op"][mine["what"] == What.FINAL]
    if not len(finals):
        return []
    final_at = int(mine["at_ns"][mine["what"] == What.FINAL][-1])
    is_final = (mine["what"] == What.RECORD) & np.isin(mine["op"], finals)
    seen: dict[int, set[int]] = {}
    for value, seq in zip(mine["value"][is_final].tolist(), mine["seq"][is_final].tolist(), strict=True):
        seen.setdefault(value, set()).add(seq)
    ends = {int(row["op"]): row for row in mine[mine["what"] == What.RETURN] if row["outcome"] == Outcome.OK}
    failed = set(mine["op"][(mine["what"] == What.RETURN) & (mine["outcome"] == Outcome.FAIL)].tolist())
    by_value: dict[int, list[Op]] = {}
    for row in mine[mine["what"] == What.APPEND]:
        if int(row["op"]) in failed:
            continue
        end = ends.get(int(row["op"]))
        returned, result = (int(end["at_ns"]), int(end["seq"])) if end is not None else (FOREVER, None)
        op = Op(int(row["at_ns"]), returned, "append", int(row["value"]), result)
        by_value.setdefault(op.value, []).append(op)  # type: ignore[arg-type]
    complaints = []
    for value, history in by_value.items():
        looks = [
            Op(final_at + n, final_at + n, "look", value, seq)
            for n, seq in enumerate(sorted(seen.get(value, {0})))
        ]
        try:
            is_explained = find_order([*history, *looks], 0, keyed_append) is not None
        except SearchTooLong:
            continue
        if not is_explained:
            answers = [op.result for op in history]
            complaints.append(
                f"key of value {value:#x}: answers {answers}, found under {sorted(seen.get(value, ()))}"
            )
    return complaints[:COMPLAINTS_MAX]


def tried_twice(rows: Rows, topic: int) -> int:
    """Count the keys of which one append never returned and an append by another client did."""
    mine = rows[rows["topic"] == topic]
    begun = mine[mine["what"] == What.APPEND]
    ended = np.isin(begun["op"], mine["op"][mine["what"] == What.RETURN])
    return len(np.intersect1d(begun["value"][~ended], begun["value"][ended]))


def is_waiting(path: Path) -> bool:
    """Whether the client of this journal has begun an append that has not returned."""
    if not path.exists():
        return False
    rows = np.fromfile(path, dtype=ROW)
    begun = rows["op"][rows["what"] == What.APPEND]
    return len(begun) > 0 and begun[-1] not in rows["op"][rows["what"] == What.RETURN]
