"""Power loss on real file systems: ext4 and XFS are shut down, with and without their journal.

A shard runs on the file system. Power fails before a randomly chosen disk call, or from another thread while
the call runs. Then the harness unmounts, mounts, verifies, recovers and judges, and continues with the next
cut of the same directory. Acks are recorded outside the file system. Each ack counts, also one that came
during or after the cut. `engine.py` does the same to the whole program at its stop points.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from dataclasses import dataclass, field

from chaos.cuts import engine
from chaos.doctor import need_root
from chaos.order import Account, CannotRun, Order
from chaos.rigs.hostdisk import HostDisk, WatchedDisk
from chaos.rigs.life import Life
from chaos.rigs.mount import FLAGS, KINDS, RigError, Volume, volume
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.errors import RinglogError
from tests.support.shard_world import ShardRunEnded

BESIDE_SHARE = 0.4
SETTINGS = {
    "engine_points": 2, "engine_share": 0.3, "kinds": list(KINDS), "beside_share": BESIDE_SHARE, "call": "",
}  # fmt: skip
"""`engine_points`: number of cases of the whole program in one run, 0: as many as fit. `engine_share`: share
of the time for the whole program. `kinds`: file systems of the lives. `beside_share`: share of the cuts that
another thread makes, some time after the chosen call began. `call`: name of the disk call at which lives are
cut, "" for all."""
CUTS_A_LIFE = 4
STEPS_MAX = 12
CALLS_MAX = 60
BESIDE_S_MAX = 0.003
RECOVERY_SHARE = 0.25
"""Share of the cuts that are followed by another cut during recovery."""
RECOVERY_CALLS_MAX = 25
CALLS_OF_ONE_NAME_MAX = 8
LIVES_MAX = 1_000_000


@dataclass(slots=True)
class _Cutter:
    """Cuts the power at the disk call it is armed for."""

    volume: Volume
    beside_share: float = BESIDE_SHARE
    call: str = ""
    """Name of the calls that count, "" for all."""
    due: int = 0
    flag: int = 1
    beside_s: float = -1.0
    """Delay (s) of a cut in another thread. Negative: cut before the call, in the calling thread."""
    calls: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None
    has_cut: bool = False

    def before(self, number: int, call: str) -> None:
        """Hook that runs before each disk call."""
        if self.call not in {"", call}:
            return
        self.due -= 1
        if self.due != 0:
            return
        self.calls.append(call)
        if self.beside_s < 0:
            self._cut()
        else:
            self.thread = threading.Thread(target=self._cut)
            self.thread.start()

    def _cut(self) -> None:
        if self.beside_s > 0:
            time.sleep(self.beside_s)
        self.volume.cut(self.flag)
        self.has_cut = True

    def finish(self) -> None:
        """Wait for the cutting thread. If no cut happened yet, cut now."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if not self.has_cut:
            self.calls.append("idle")
            self._cut()
        self.due = 0


def live(
    volume: Volume, rng: random.Random, account: Account, name: str, *, beside_share: float = BESIDE_SHARE,
    call: str = "",
) -> None:  # fmt: skip
    """Take one directory through CUTS_A_LIFE cuts. Raises GuaranteeBroken with the steps so far."""
    root = volume.root / name
    cutter = _Cutter(volume, beside_share, call)

    def wrap(disk: HostDisk) -> WatchedDisk:
        return WatchedDisk(disk, cutter.before)

    life = Life(root, wrap)
    life.start()
    story: list[str] = []
    try:
        for _ in range(CUTS_A_LIFE):
            _work_until_cut(life, cutter, rng, story)
            _power_on(life, cutter)
            verify(root)
            if rng.random() < RECOVERY_SHARE:
                _cut_recovery(life, cutter, rng, story)
                _power_on(life, cutter)
                account.count_work("cuts", 1, "RF-61")
                account.count_work("cuts inside a recovery")
            life.recover()
            acked = life.model.owed
            account.count_work("cuts", 1, "RF-61")
            account.count_work(f"cuts of {volume.kind}, flag {cutter.flag}")
            account.count_work("acked frames held to", acked)
    except (GuaranteeBroken, RinglogError, AssertionError) as e:
        raise GuaranteeBroken(f"{type(e).__name__}: {e}\n{' '.join(story)}") from e
    finally:
        life.end()
        volume.down()  # It may have been cut off.
        volume.up()
        shutil.rmtree(root, ignore_errors=True)


def _power_on(life: Life, cutter: _Cutter) -> None:
    life.end()
    cutter.volume.down()
    cutter.volume.up()


def _arm(cutter: _Cutter, rng: random.Random, calls: int) -> None:
    cutter.has_cut = False
    cutter.flag = rng.choice(FLAGS)
    cutter.beside_s = rng.uniform(0.0, BESIDE_S_MAX) if rng.random() < cutter.beside_share else -1.0
    cutter.due = rng.randint(1, CALLS_OF_ONE_NAME_MAX if cutter.call else calls)


def _cut_recovery(life: Life, cutter: _Cutter, rng: random.Random, story: list[str]) -> None:
    """Cut power again while the shard starts. No client has seen data of this start yet."""
    _arm(cutter, rng, RECOVERY_CALLS_MAX)
    with contextlib.suppress(RinglogError, ShardRunEnded):
        life.start(is_reboot=True)
    cutter.finish()
    story.append(f"CUT(start, {cutter.calls[-1]}, flag {cutter.flag}, {cutter.beside_s:.4f} s)")


def _work_until_cut(life: Life, cutter: _Cutter, rng: random.Random, story: list[str]) -> None:
    _arm(cutter, rng, CALLS_MAX)
    # After the cut the dead file system fails all calls. Each failure must be a typed error.
    with contextlib.suppress(RinglogError, ShardRunEnded):
        for _ in range(STEPS_MAX):
            story.append(life.step(rng))
            if cutter.has_cut:
                break
    cutter.finish()
    story.append(f"CUT({cutter.calls[-1]}, flag {cutter.flag}, {cutter.beside_s:.4f} s)")


def run(order: Order, account: Account) -> None:
    """Run lives on both file systems in turn, then the whole program at its stop points."""
    settings = order.choose(SETTINGS)
    need_root()
    until = time.monotonic() + order.seconds * (1.0 - settings["engine_share"])
    with contextlib.ExitStack() as stack:
        volumes = []
        for kind in settings["kinds"]:
            try:
                volumes.append(stack.enter_context(volume(kind, order.scratch)))
            except (RigError, OSError) as e:
                account.skip(f"power cuts of {kind}", str(e))
        if not volumes:
            raise CannotRun("; ".join(skip.why for skip in account.skipped))
        for number in range(LIVES_MAX):
            one = volumes[number % len(volumes)]
            case = f"{one.kind}/{number}"
            try:
                live(
                    one, order.random(case), account, f"life-{number}",
                    beside_share=settings["beside_share"], call=settings["call"],
                )  # fmt: skip
            except GuaranteeBroken as e:
                account.report_finding(f"after a power cut of {one.kind}: {str(e)[:300]}", case, str(e))
            if time.monotonic() > until or order.is_enough(account.counts, "cuts", "cuts inside a recovery"):
                break
    engine.run(order, account, settings["engine_points"], order.seconds * settings["engine_share"])


def replay(order: Order, case: str) -> None:
    """Repeat a case: `KIND/NUMBER` for a life, `engine/KIND/POINT/FLAG` for the whole program.

    Needs a private mount namespace.
    """
    if case.startswith("engine/"):
        engine.replay(order, case)
        return
    kind = case.split("/", maxsplit=1)[0]
    with volume(kind, order.scratch) as one:
        account = Account()
        live(one, order.random(case), account, "life")
        account.print_report()
