"""The class `syscalls` on one system call of the whole program."""

from __future__ import annotations

import os
import shutil

import pytest

from chaos.order import Order
from chaos.syscalls import Case, _run_batch


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="needs strace and root")
@pytest.mark.timeout(120)
def test_a_failed_sync_of_the_real_program_loses_no_acknowledged_record(account, tmp_path):
    order = Order("syscalls", 1, 1.0, tmp_path)
    _run_batch(order.scratch / "engine", [Case("wal_shard", "fdatasync", "EIO", "1")], account, 1e18)
    assert account.faults["RF-38"] == 1
    assert account.counts["acked batches held to"] > 3
