"""Snapshot rows from before queues and groups shared one implementation are read with their original
meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringlog.leases.change import Op
from ringlog.leases.failures import Failure
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.pending_list import list_pending
from ringlog.leases.runs import DELAYED, EXHAUSTED, LEASED
from ringlog.leases.snapshot import decode_group, decode_queue_leases, encode_group, encode_queue_leases
from ringlog.leases.tokens import LeaseTokens

GOLDEN = Path(__file__).parents[1] / "golden" / "leases"
NOW = 1_700_000_000_500


def row_of(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}_row.hex").read_text())


def test_an_old_row_with_durable_leases_of_a_queue_is_read():
    queue = decode_queue_leases(row_of("queue"))
    for each in (queue, decode_queue_leases(encode_queue_leases(queue))):
        assert (each.last_change_number, each.at_ms, each.dead_lettered) == (5, NOW, 6)
        assert [each.state_of(seq) for seq in (8, 9, 11)] == [LEASED, DELAYED, EXHAUSTED]
        assert dict(each.failures) == {9: Failure("busy", NOW, 1), 11: Failure("why", NOW, 0)}
        assert list(each.processes.by_number.values()) == [(4_711, 815)]
        claimed, released = each.recent_calls.find(77), each.recent_calls.find(78)
        assert (claimed.op, claimed.node, claimed.process_id, claimed.exhausted) == (
            Op.CLAIMED,
            "ann",
            (4_711, 815),
            [5, 2],
        )
        assert (released.op, released.rows, released.skipped) == (Op.RELEASED, [9, 1], [4])
    queue.finish_recovery(LiveSeqs(1, 20), LeaseTokens(4))
    matched = queue.match(np.array([8]), np.array([0x30000000006], np.uint64), "ann", NOW)
    assert matched.leased.tolist() == [8]


def test_an_old_row_of_a_group_is_read():
    group = decode_group(row_of("group"))
    for each in (group, decode_group(encode_group(group))):
        assert (each.last_change_number, each.cursor, each.pending, each.config.key) == (
            3,
            12,
            3,
            "billing@^eu.",
        )
        assert [entry[:5] for entry in list_pending(each, NOW)[0]] == [
            (8, 9, 3, "", 1),
            (9, 10, 1, "ann", 1),
            (11, 12, 1, "ann", 3),
        ]
        assert dict(each.failures) == {8: Failure("no address", NOW + 400, 0)}
        assert each.recent_calls.find(77).op == Op.CLAIMED
        each.set_dead_lettering(True)
        assert each.exhausted_runs(9) == [(8, 9, 1)]
