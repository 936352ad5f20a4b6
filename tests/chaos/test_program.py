"""The judge of the whole program's traffic, and chaos/syscalls on one call."""

from __future__ import annotations

import os
import shutil

import pytest

from chaos.order import Account, Broken, Order
from chaos.rigs.program import BATCH, Asked, Traffic
from chaos.syscalls import Case, _run_batch


def traffic_of(*acked: bool) -> tuple[Traffic, list[list[bytes]]]:
    traffic = Traffic("")
    batches = [[f"{n}:{i}".encode() for i in range(BATCH)] for n in range(len(acked))]
    traffic.asked["alpha"] = [Asked(batch, is_acked) for batch, is_acked in zip(batches, acked, strict=True)]
    return traffic, batches


def there(*batches: list[bytes]) -> set[bytes]:
    return {payload for batch in batches for payload in batch}


def test_what_was_not_acked_may_be_there_or_not():
    traffic, (first, second, third) = traffic_of(True, False, True)
    traffic._judge_batches("alpha", there(first, third), 1)
    traffic._judge_batches("alpha", there(first, second, third), 1)


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_an_acked_batch_that_is_gone_is_found(left_out):
    traffic, batches = traffic_of(True, True, True)
    rest = [batch for i, batch in enumerate(batches) if i != left_out]
    with pytest.raises(Broken, match="gone"):
        traffic._judge_batches("alpha", there(*rest), 1)


def test_half_a_batch_is_found():
    traffic, (first, second) = traffic_of(True, False)
    with pytest.raises(Broken, match="gone"):
        traffic._judge_batches("alpha", there(first, second[:5]), 1)


def test_what_was_deleted_may_be_gone_and_no_more():
    traffic, (_, second, third) = traffic_of(True, True, True)
    traffic.floor["alpha"] = BATCH + 1
    traffic._judge_batches("alpha", there(second, third), BATCH + 1)
    with pytest.raises(Broken, match="gone"):
        traffic._judge_batches("alpha", there(third), BATCH + 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="needs strace and root")
@pytest.mark.timeout(120)
def test_a_failed_sync_of_the_real_program_loses_nothing(tmp_path):
    account = Account()
    order = Order("syscalls", 1, 1.0, tmp_path)
    _run_batch(order.scratch / "engine", [Case("wal_shard", "fdatasync", "EIO", "1")], account, 1e18)
    assert account.faults["RF-38"] == 1
    assert account.counts["acked batches held to"] > 3
