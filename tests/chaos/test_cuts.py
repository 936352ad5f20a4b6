"""The classes `cuts`, `blocks` and `syncs`: a small slice passes, and planted bugs are detected."""

from __future__ import annotations

import pytest

from tests.support.real_disks import in_private_mounts, needs_mounts

pytestmark = [needs_mounts, pytest.mark.slow]

CUTS = """
from chaos.cuts import live
from chaos.order import Account, Order
from ringlog.drill.checks import GuaranteeBroken
from chaos.rigs.mount import volume
account, found = Account(), ""
with volume(args[0], scratch) as one:
    for number in range(int(args[1])):
        try:
            live(one, Order("cuts", 1, 1.0, scratch).random(number), account, f"life-{number}")
        except GuaranteeBroken as e:
            found = str(e)
            break
"""

BLOCKS = """
import time
from chaos.blocks import live
from chaos.order import Account, Order
from chaos.rigs.blockstore import stored_volume
account = Account()
order = Order("blocks", 1, 1.0, scratch)
with stored_volume(args[0], scratch) as stored:
    live(stored, args[0], 1, order, account, time.monotonic() + float(args[1]))
found = account.findings[0].what if account.findings else ""
"""

SYNCS = """
from chaos.order import Account, Order
from ringlog.drill.checks import GuaranteeBroken
from chaos.rigs.blockstore import stored_volume
from chaos.syncs.shard import run_case
account, found = Account(), ""
with stored_volume(args[0], scratch) as stored:
    for name in args[1:]:
        try:
            run_case(stored, name, Order("syncs", 1, 1.0, scratch).random(name), account)
        except GuaranteeBroken as e:
            found = str(e)
"""

HOLDS = """
assert not found, found
assert account.counts["acked frames held to"] > 0, account.counts
"""

CAUGHT = """
assert found, account.counts
print(found)
"""

# -- planted bugs -------------------------------------------------------------------------------------------

NO_SYNC = """
from ringlog.storage.real_disk import RealDisk
really = RealDisk._sync
def sync(self, fd, call, ask):
    really(self, fd, call, (lambda fd: None) if call == "CALL" else ask)  # Says so, and does nothing.
RealDisk._sync = sync
"""
FAILED_SYNC_BELIEVED = """
import os
from ringlog.storage.real_disk import RealDisk
def sync(self, fd, call, really):
    try:
        really(fd)
    except OSError:
        really(fd)  # Once more, as PostgreSQL did for twenty years.
RealDisk._sync = sync
"""
EIO_IS_THE_END = """
from ringlog.errors import DiskError
from ringlog.storage.real_disk import RealDisk
read_into, read_at = RealDisk.read_into, RealDisk.read_at
def lenient_into(self, fd, buffer, offset):
    try:
        return read_into(self, fd, buffer, offset)
    except DiskError:
        memoryview(buffer).cast("B")[:] = bytes(memoryview(buffer).nbytes)
        return memoryview(buffer).nbytes
def lenient_at(self, fd, length, offset):
    try:
        return read_at(self, fd, length, offset)
    except DiskError:
        return bytes(length)
RealDisk.read_into, RealDisk.read_at = lenient_into, lenient_at
"""
NOT_COPIED = """
from ringlog.actors.wal_shard.recovery.copy_forward import CopyForward
CopyForward.copy = lambda self, *args, **facts: None  # What is in doubt is served from where it lies.
"""


KINDER_RULES = """
from chaos.states import images
do = images.Tree.do
def at_once(self, operation):
    do(self, operation)  # As if every write reached the device when it was made.
    for node, _ in self.pending:
        node.promote(node.serial)
    self.pending = []
images.Tree.do = at_once
"""


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_lose_no_acknowledged_record(tmp_path, kind):
    in_private_mounts(CUTS + HOLDS + "assert account.counts['cuts'] >= 8", tmp_path, kind, "2")


@pytest.mark.parametrize("call", ["sync_data", "sync_file"])
def test_power_cuts_detect_a_missing_sync(tmp_path, call):
    in_private_mounts(NO_SYNC.replace("CALL", call) + CUTS + CAUGHT, tmp_path, "xfs", "20")


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_block_states_are_recovered_and_allowed_by_the_rules(tmp_path, kind):
    in_private_mounts(BLOCKS + HOLDS + "assert account.counts['block_states'] >= 10", tmp_path, kind, "5")


@pytest.mark.night
@pytest.mark.parametrize("call", ["sync_data", "sync_file"])
def test_block_states_detect_a_missing_sync(tmp_path, call):
    in_private_mounts(NO_SYNC.replace("CALL", call) + BLOCKS + CAUGHT, tmp_path, "ext4", "8")


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_failing_devices_lose_no_acknowledged_record(tmp_path, kind):
    names = ("once", "trap", "between", "dead", "recovery", "reader", "lies")
    check = "assert account.counts['sync_failures'] >= 3 and account.faults['RF-42'] == 1, account.counts"
    in_private_mounts(SYNCS + HOLDS + check, tmp_path, kind, *names)


@pytest.mark.parametrize(
    ("bug", "case"),
    [(FAILED_SYNC_BELIEVED, "once"), (EIO_IS_THE_END, "recovery"), (NOT_COPIED, "trap")],
    ids=["failed sync tried again", "read error as end", "tail not copied"],
)
def test_failing_devices_detect_code_that_ignores_their_errors(tmp_path, bug, case):
    in_private_mounts(bug + SYNCS + CAUGHT, tmp_path, "ext4", case)


@pytest.mark.night
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_rules_weaker_than_a_real_file_system_are_detected(tmp_path, kind):
    said = in_private_mounts(KINDER_RULES + BLOCKS + CAUGHT, tmp_path, kind, "4")
    assert "no rule of chaos/states makes this state" in said
