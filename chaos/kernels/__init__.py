"""Whole kernels that die under load (T-11): a shard in User-Mode Linux on ext4, killed with its kernel.

Each guest recovers what the one before it left on the same image, shows all of it, and writes on; what it
acknowledges goes to the host by its console. Then the kernel is killed, at an ack chosen by chance and a
moment later: its page cache, journal and everything in flight are gone, the image stays. A death counts when
a later guest has recovered from it and was judged.

Settings: `guests` beside each other (2), `acks` a life lasts at most (120), `lives` on one image (8).
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
"""A guest that has not shown its state by then hangs."""
PAUSE_S_MAX = 0.02
EARLY = 0.12
"""How often a guest dies before it has recovered."""
MOUNTS = ("data=ordered", "data=writeback", "data=ordered,commit=1", "data=journal")
KNOWN = {"guests": 2, "acks": 120, "lives": 8}


@dataclass(slots=True)
class Slot:
    """One image and the guests on it, one after the other."""

    order: Order
    account: Account
    shim: Path
    number: int
    settings: dict[str, int]
    program: tuple[str, ...] = (sys.executable, "-P", str(DRIVER))
    """What a guest runs, without the number of its life."""
    rng: random.Random = field(init=False)
    image: Path = field(init=False)
    story: Story = field(default_factory=Story)
    life: int = 0
    images: int = 0
    """How many were used up."""
    unjudged: int = 0
    """Deaths under load that no guest has recovered from yet."""
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
        """One guest from boot to death; `is_last`: it only shows what the one before it left."""
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
        """Die somewhere between boot and the end of recovery."""
        deadline = time.monotonic() + self.rng.uniform(1.0, 5.0)
        while (line := guest.line(deadline)) is not None and not line.startswith("@state"):
            self.story.hear(self.life, line)
        self.account.did("early_deaths", 1, "RF-63")

    def _await_state(self, guest: Guest) -> bool:
        deadline = time.monotonic() + BOOT_S
        said: list[str] = []
        while (line := guest.line(deadline)) is not None:
            said.append(line)
            if line.startswith("@state"):
                found = self.story.judge(self.life, line)
                self.account.did("recovered_records", found)
                self.account.did("kernel_deaths", self.unjudged, "RF-63")
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
            self.account.found(
                wrong, f"{self.order.seed}:{self.number}:{self.images}", "\n".join(self.story.wrong)
            )
        if self.story.wrong or self.life >= self.settings["lives"]:
            if not self.story.wrong and self.unjudged:
                return
            self._renew()


def run(order: Order, account: Account) -> None:
    """Let kernels die until the time is over; raises CannotRun without a guest kernel."""
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
    account.did("acks", sum(slot.acks for slot in slots))
    account.did("images", sum(slot.images for slot in slots))


def _prove_boots(order: Order, shim: Path) -> None:
    """A guest kernel that does not come up on this processor is the host's lack, not ringlog's fault."""
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
    raise CannotRun(f"a guest kernel does not come up: {' / '.join(said)[-400:]}")


def replay(order: Order, case: str) -> None:
    """Live through the lives of one slot again: `seed:slot:images`. Moments differ, choices do not."""
    seed, number, images = map(int, case.split(":"))
    again = Order(order.name, seed, order.seconds, order.scratch, order.settings)
    account = Account()
    slot = Slot(again, account, build_shim(order.scratch), number, again.choose(KNOWN))
    while slot.images <= images and not account.findings:
        slot.live()
        print(f"image {slot.images} life {slot.life}: {slot.acks} acks, {dict(account.counts)}")
    account.tell()
