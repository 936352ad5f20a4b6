"""Rows of snapshots that were written before queues and groups had one engine: read as what they said."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringlog.leases.change import Op
from ringlog.leases.failures import Failure
from ringlog.leases.live_seqs import Live
from ringlog.leases.runs import DELAYED, EXHAUSTED, LEASED
from ringlog.leases.snapshot import load, load_own, save, save_own
from ringlog.leases.tokens import Tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "leases"
NOW = 1_700_000_000_500


def row_of(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}_row.hex").read_text())


def test_durable_leases_of_a_queue_are_read():
    queue = load_own(row_of("queue"))
    for each in (queue, load_own(save_own(queue))):
        assert (each.changes, each.at_ms, each.dead_lettered) == (5, NOW, 6)
        assert [each.state_of(seq) for seq in (8, 9, 11)] == [LEASED, DELAYED, EXHAUSTED]
        assert dict(each.failures) == {9: Failure("busy", NOW, 1), 11: Failure("why", NOW, 0)}
        assert list(each.lives.values()) == [(4_711, 815)]
        claimed, released = each.calls.find(77), each.calls.find(78)
        assert (claimed.op, claimed.node, claimed.life, claimed.aside) == (
            Op.CLAIMED,
            "ann",
            (4_711, 815),
            [5, 2],
        )
        assert (released.op, released.rows, released.skipped) == (Op.RELEASED, [9, 1], [4])
    queue.recovered(Live(1, 20), Tokens(4))
    matched = queue.match(np.array([8]), np.array([0x30000000006], np.uint64), "ann", NOW)
    assert matched.leased.tolist() == [8]


def test_a_group_is_read():
    group = load(row_of("group"))
    for each in (group, load(save(group))):
        assert (each.changes, each.cursor, each.pending, each.made.key) == (3, 12, 3, "billing@^eu.")
        assert [entry[:5] for entry in each.list_pending(NOW)[0]] == [
            (8, 9, 3, "", 1),
            (9, 10, 1, "ann", 1),
            (11, 12, 1, "ann", 3),
        ]
        assert dict(each.failures) == {8: Failure("no address", NOW + 400, 0)}
        assert each.calls.find(77).op == Op.CLAIMED
        each.use_mover(True)
        assert each.exhausted_runs(9) == [(8, 9, 1)]
