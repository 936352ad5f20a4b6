"""Guest kernels that die under load (RF-63): a shard runs in User-Mode Linux on ext4, and both are killed.

Each guest recovers the state that the previous guest left on the same image, and sends all of it to the host.
Then it writes, and sends its acknowledgements to the host through its console. The host kills the kernel a
short time after a randomly selected ack. The guest's page cache and all I/O in flight are lost; the image
stays. A death counts after a later guest has recovered from it and its state was checked.

Settings: `guests` in parallel (2), maximum `acks` in one life (120), `lives` on one image (8).
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos.kernels.guest import Guest, build_shim, make_image, need_kernel
from chaos.kernels.judge import Story
from chaos.order import Account, CannotRun, Order

DRIVER = Path(__file__).parent / "driver.py"
ROOT = Path(__file__).parent.parent.parent
BOOT_S = 60.0
"""Time limit (s) from boot until a guest sends its state. A slower guest hangs."""
PAUSE_S_MAX = 0.02
EARLY = 0.12
"""Share of lives in which the guest is killed before it has recovered."""
MOUNTS = ("data=ordered", "data=writeback", "data=ordered,commit=1", "data=journal")
KNOWN = {"guests": 2, "acks": 120, "lives": 8}


@dataclass(slots=True)
class Slot:
    """One image, and the sequence of guests on it."""

    order: Order
    account: Account
    shim: Path
    number: int
    settings: dict[str, int]
    program: tuple[str, ...] = (sys.executable, "-P", str(DRIVER))
    """Command that a guest runs, without the number of its life."""
    rng: random.Random = field(init=False)
    image: Path = field(init=False)
    story: Story = field(default_factory=Story)
    life: int = 0
    images: int = 0
    """Number of images used so far."""
    unjudged: int = 0
    """Deaths under load from which no guest has recovered yet."""
    acks: int = 0

    def __post_init__(self) -> None:
        self.rng = self.order.random("slot", self.number)
        self.image = self.order.scratch / f"disk-{self.number}.img"
        self._renew()

    def _renew(self) -> None:
        make_image(self.image)
        self.story, self.life, self.unjudged = Story(), 0, 0
        self.images += 1

    def live(self, *, is_last: bool = False) -> None:
        """Run one guest from boot to death.

        With `is_last` it only sends the recovered state and does not write.
        """
        self.life += 1
        early = self.rng.random() < EARLY and not is_last and self.life > 1
        target, pause = self.rng.randint(1, self.settings["acks"]), self.rng.random() * PAUSE_S_MAX
        options = self.rng.choice(MOUNTS)
        name = f"g{self.number}-{self.images}-{self.life}"
        guest = Guest(self.order.scratch, self.shim, self.image, name, options)
        environ = {
            "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1",
            "RINGLOG_ALLOW_ROOT": "1",
        }  # fmt: skip
        guest.start([*self.program, str(self.life)], environ)
        try:
            if early:
                self._wait_early(guest)
            elif self._await_state(guest) and not is_last:
                self._load(guest, target)
                time.sleep(pause)
        finally:
            left = guest.kill()
        for line in left:
            self.acks += self.story.hear(self.life, line)
        if not early and not is_last and self.life in self.story.highest:
            self.unjudged += 1
        self._report()

    def _wait_early(self, guest: Guest) -> None:
        """Wait for a random time between boot and the end of recovery."""
        deadline = time.monotonic() + self.rng.uniform(1.0, 5.0)
        while (line := guest.line(deadline)) is not None and not line.startswith("@state"):
            self.story.hear(self.life, line)
        self.account.count_work("early_deaths", 1, "RF-63")

    def _await_state(self, guest: Guest) -> bool:
        deadline = time.monotonic() + BOOT_S
        said: list[str] = []
        while (line := guest.line(deadline)) is not None:
            said.append(line)
            if line.startswith("@state"):
                found = self.story.judge(self.life, line)
                self.account.count_work("recovered_records", found)
                self.account.count_work("kernel_deaths", self.unjudged, "RF-63")
                self.unjudged = 0
                return True
            self.story.hear(self.life, line)
        if not any(line.startswith("@error") for line in said):
            self.story.wrong.append(f"life {self.life}: no state within {BOOT_S:.0f} s: {said[-12:]}")
        return False

    def _load(self, guest: Guest, target: int) -> None:
        deadline, heard = time.monotonic() + BOOT_S, 0
        while heard < target and (line := guest.line(deadline)) is not None:
            heard += self.story.hear(self.life, line)
        self.acks += heard

    def _report(self) -> None:
        for wrong in self.story.wrong:
            self.account.report_finding(
                wrong, f"{self.order.seed}:{self.number}:{self.images}", "\n".join(self.story.wrong)
            )
        if self.story.wrong or self.life >= self.settings["lives"]:
            if not self.story.wrong and self.unjudged:
                return
            self._renew()


def run(order: Order, account: Account) -> None:
    """Kill kernels until the time is over. Raises CannotRun if no guest kernel can run."""
    need_kernel()
    settings = order.choose(KNOWN)
    shim = build_shim(order.scratch)
    _prove_boots(order, shim)
    until = time.monotonic() + order.seconds
    slots = [Slot(order, account, shim, number, settings) for number in range(settings["guests"])]
    errors: list[Exception] = []

    def work(slot: Slot) -> None:
        try:
            while time.monotonic() < until and not order.is_enough(account.counts):
                slot.live()
            if slot.unjudged:
                slot.live(is_last=True)
        except Exception as e:  # noqa: BLE001 - of the harness; raised again where it is seen
            errors.append(e)

    threads = [threading.Thread(target=work, args=(slot,), name=f"guest-{slot.number}") for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    account.count_work("acks", sum(slot.acks for slot in slots))
    account.count_work("images", sum(slot.images for slot in slots))


def _prove_boots(order: Order, shim: Path) -> None:
    """Boot a guest that prints one line. Raises CannotRun if it fails: that is a limit of the host."""
    image = order.scratch / "boot.img"
    make_image(image)
    guest = Guest(order.scratch, shim, image, "boot")
    guest.start(["echo", "@up"], {})
    said: list[str] = []
    try:
        deadline = time.monotonic() + BOOT_S
        while (line := guest.line(deadline)) is not None:
            said.append(line)
            if line == "@up":
                return
    finally:
        guest.kill()
        image.unlink()
    raise CannotRun(f"the guest kernel did not boot within {BOOT_S:.0f} s: {' / '.join(said)[-400:]}")


def replay(order: Order, case: str) -> None:
    """Repeat the lives of one slot: `seed:slot:images`. The choices are the same; the exact times differ."""
    seed, number, images = map(int, case.split(":"))
    again = Order(order.name, seed, order.seconds, order.scratch, order.settings)
    account = Account()
    slot = Slot(again, account, build_shim(order.scratch), number, again.choose(KNOWN))
    while slot.images <= images and not account.findings:
        slot.live()
        print(f"image {slot.images} life {slot.life}: {slot.acks} acks, {dict(account.counts)}")
    account.print_report()
