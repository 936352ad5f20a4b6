"""Real sync failures: the device below ext4 and XFS fails writes or reads, lags, dies and returns.

File systems, page cache and errors are those of the kernel; only the block device is simulated
(chaos/rigs/blockstore.py). `shard.py` tests a shard's core, log writer and recovery, `engine.py` the whole
program.
"""

from __future__ import annotations

import contextlib
import time

from chaos.doctor import need_root
from chaos.order import Account, CannotRun, Order
from chaos.rigs.blockstore import stored_volume
from chaos.rigs.mount import KINDS, RigError
from chaos.syncs import engine, shard
from ringlog.drill.checks import GuaranteeBroken

SETTINGS = {"engine": ["fails", "lags"], "engine_share": 0.5, "rounds_min": 4}
"""`engine`: cases of engine.CASES for the whole program, in turn. `engine_share`: share of the time for them.
`rounds_min`: minimum number of rounds of the shard's cases, however slow the host is."""
ROUNDS_MAX = 1_000_000


def run(order: Order, account: Account) -> None:
    """Run the shard's cases on both file systems repeatedly, then the cases of the program.

    Each case of the program runs at least once, and repeatedly while time remains.
    """
    settings = order.choose(SETTINGS)
    need_root()
    begun = time.monotonic()
    _run_shard(
        order, account, settings["rounds_min"], begun + order.seconds * (1.0 - settings["engine_share"])
    )
    engine.run(order, account, list(settings["engine"]), begun + order.seconds)


def _run_shard(order: Order, account: Account, rounds_min: int, until: float) -> None:
    with contextlib.ExitStack() as stack:
        stores = {}
        for kind in KINDS:
            try:
                stores[kind] = stack.enter_context(stored_volume(kind, order.scratch))
            except (RigError, OSError) as e:
                account.skip(f"a failing device below {kind}", str(e))
        if not stores:
            raise CannotRun("; ".join(skip.why for skip in account.skipped))
        for number in range(ROUNDS_MAX):
            for kind, stored in stores.items():
                for name in shard.CASES:
                    case = f"shard/{kind}/{name}/{number}"
                    try:
                        shard.run_case(stored, name, order.random(case), account)
                    except GuaranteeBroken as e:
                        account.report_finding(f"a shard on {kind}, {name}: {str(e)[:300]}", case, str(e))
                    is_enough = order.is_enough(account.counts, "sync_failures", "traps")
                    if number >= rounds_min and (is_enough or time.monotonic() > until):
                        return


def replay(order: Order, case: str) -> None:
    """Repeat `shard/KIND/CASE/NUMBER` or `engine/KIND/CASE`. Needs a private mount namespace."""
    who, kind, name, *_ = case.split("/")
    account = Account()
    if who == "engine":
        engine.run_case(name, order, kind, account)
    else:
        with stored_volume(kind, order.scratch) as stored:
            shard.run_case(stored, name, order.random(case), account)
    account.print_report()
