"""Damaged payloads in segments that are merged, moved, healed or backed up (RF-80, RF-82).

No step may copy the damage. The rig is a small data directory with a topic's segments in both tiers. The
production reclaimer, relocator and scrub work on it, with fake shards that know only segments.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyroaring import BitMap64

from chaos.rigs.judge import write_files
from chaos.rigs.storage import reclaimer_of
from chaos.rot.specimen import Specimen
from ringlog.actors.reclaimer.reclaim_round import Reclaimer
from ringlog.actors.reclaimer.scrub_pass import ScrubItem
from ringlog.actors.reclaimer.scrubber import Scrubber
from ringlog.actors.relocator.mover import Mover
from ringlog.cli.app import run as ringlog_command
from ringlog.cli.outcome import CliExit
from ringlog.config import ColdConfig, StorageConfig
from ringlog.envelope import messages as m
from ringlog.limits import KIB
from ringlog.segment.index_rebuild import verify_segment
from ringlog.segment.layout import CREATOR_RECLAIMER, DATA, NumberAllocator
from ringlog.testing.clock import ManualClock
from ringlog.testing.disk import SimulatedDisk
from ringlog.tier.copies import SegmentCopies
from ringlog.tier.local import LocalStore
from ringlog.tier.ownership import OwnedStore
from tests.support.segment_files import ENGINE_ID, FakeShards, make_segment
from tests.support.shard_world import DATA as DATA_DIR

TOPIC = 7
SEGMENTS = 4
RECORDS = 10
NUMBER = 1 << 48
PAYLOAD = 5_000
"""Offset in a data part that lies in a frame's body."""
SETTINGS = StorageConfig(segment_bytes=64 * KIB, own_segment_bytes=16 * KIB, segment_records=10_000)
Damage = tuple[str, int]
"""Name of a place, and the offset of the flipped bit. A negative offset counts from the end."""
PLACES: tuple[Damage, ...] = (("header", 100), ("frame header", 4096 + 20), ("body", PAYLOAD), ("end", -9))


class Rig:
    """Segments of one topic in the hot tier. Some may be copied to the cold tier."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk("/data", "/data/meta", "/cold")
        self.clock = ManualClock()
        self.shards = FakeShards()
        self.refs = [
            make_segment(
                self.disk, "/data", NUMBER + n, {TOPIC: range(n * RECORDS + 1, (n + 1) * RECORDS + 1)},
                payload_bytes=300,
            )
            for n in range(SEGMENTS)
        ]  # fmt: skip
        self.shards.register(*self.refs)
        self.shards.topics[TOPIC] = (1, 1, BitMap64())
        store = OwnedStore(LocalStore(self.disk, "/cold"), self.disk, "/data", ENGINE_ID.hex())
        store.claim()
        self.copies = SegmentCopies(self.disk, "/data", store)
        self.scrubber = Scrubber(
            self.disk, "/data", self.copies, rate_limiter=lambda _: None, is_current=lambda _: True
        )

    def path(self, n: int, root: str = "/data") -> str:
        """Return the path of the data part of segment n."""
        return f"{root}/{self.refs[n].stem}{DATA}"

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        return self.disk.contents()[path]

    def flip(self, path: str, at: int) -> None:
        """Flip one bit."""
        fd = self.disk.open_for_overwrite(path)
        at = at if at >= 0 else self.disk.size(fd) + at
        byte = self.disk.read_at(fd, 1, at)[0]
        self.disk.write_at(fd, [bytes([byte ^ 0x10])], at)
        self.disk.sync_file(fd)
        self.disk.close(fd)

    def scrub(self, n: int, *, heals: bool) -> list[str]:
        """Scrub one segment; return the findings."""
        ref = self.refs[n]
        return self.scrubber.verify_item(ScrubItem(ref.stem, ref.data_bytes, ref), heals=heals)

    def merge(self) -> Reclaimer:
        """Run a round of the reclaimer, which merges the small segments."""
        reclaimer = reclaimer_of(
            self.disk, self.shards.ask, SETTINGS, NumberAllocator(CREATOR_RECLAIMER, []), self.clock,
            self.copies, engine_id=ENGINE_ID, data_dir="/data", quarantined=lambda: self.scrubber.quarantined,
        )  # fmt: skip
        reclaimer.run_round()
        return reclaimer

    def move(self) -> Mover:
        """Run a round of the relocator, which moves all segments except the newest."""
        mover = Mover(
            self.copies, ColdConfig(dir="/cold", hot_segments=1), shards=1,
            ask=lambda shard, message, _: self._ask(shard, message), clock=self.clock, jitter=lambda: 0.0,
        )  # fmt: skip
        mover.run_round()
        return mover

    def _ask(self, shard: int, message: m.Message) -> Any:
        return self.shards.ask(shard, message)[0]

    def verified(self) -> list[str]:
        """Return the damage in hot segments that the shards refer to."""
        refs = self.shards.refs[0].values()
        return [
            each
            for ref in refs
            if ref.tier != m.TIER_COLD
            for each in verify_segment(self.disk, "/data", ref.stem)
        ]


def cases() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yield (row, name, case). A case returns a description of the problem, or an empty string."""
    for name, at in PLACES:
        yield "RF-80", f"merge {name}", lambda at=at: merged(at)  # type: ignore[misc]
        yield "RF-80", f"move {name}", lambda at=at: moved(at)  # type: ignore[misc]
        for rotten in ("/data", "/cold"):
            yield "RF-82", f"{rotten} {name}", lambda at=at, rotten=rotten: healed(at, rotten)  # type: ignore[misc]
        yield "RF-82", f"both {name}", lambda at=at: both(at)  # type: ignore[misc]


def merged(at: int) -> str:
    """Merge a damaged segment: it must stay unchanged and referenced, so that readers get the error."""
    rig = Rig()
    rig.flip(rig.path(1), at)
    before = rig.read(rig.path(1))
    rig.merge()
    known = {ref.number for ref in rig.shards.refs[0].values()}
    if rig.refs[1].number not in known:
        # A merge does not copy the header of a data part. All records must be there, undamaged.
        if at >= 4096 or at < 0 or rig.verified():
            return "a damaged segment was merged away"
        return ""
    if not rig.disk.exists(rig.path(1)) or rig.read(rig.path(1)) != before:
        return "a damaged segment was changed by a merge"
    made = [
        ref for ref in rig.shards.refs[0].values() if ref.number not in {each.number for each in rig.refs}
    ]
    wrong = [each for ref in made for each in verify_segment(rig.disk, "/data", ref.stem)]
    return f"a merge passed damage on: {wrong}" if wrong else ""


def moved(at: int) -> str:
    """Move segments to the cold tier: the damaged one must stay, the others must move."""
    rig = Rig()
    rig.flip(rig.path(1), at)
    before = rig.read(rig.path(1))
    rig.move()
    tiers = [rig.shards.refs[0][ref.number].tier for ref in rig.refs]
    if tiers[1] != 0 or not rig.disk.exists(rig.path(1)) or rig.read(rig.path(1)) != before:
        return f"a damaged segment was moved: {tiers}"
    if rig.disk.exists(rig.path(1, "/cold")):
        return "a damaged segment was copied to the cold tier"
    return "" if tiers[0] == m.TIER_COLD else f"one damaged segment keeps others from being moved: {tiers}"


def healed(at: int, rotten: str) -> str:
    """Damage one of two copies: the other copy must heal it, byte for byte, and stay unchanged."""
    rig = Rig()
    rig.copies.upload_part(rig.refs[1].stem + DATA)
    sound = rig.read(rig.path(1))
    rig.flip(rig.path(1, rotten), at)
    if rotten == "/data":
        findings = rig.scrub(1, heals=False)
        if not findings:
            return "a scrub did not see damage"
        rig.scrub(1, heals=True)
    else:
        rig.move()  # overwrites an object from an earlier attempt
    left = [root for root in ("/data", "/cold") if rig.disk.exists(rig.path(1, root))]
    return (
        "" if left and all(rig.read(rig.path(1, root)) == sound for root in left) else f"not healed: {left}"
    )


def both(at: int) -> str:
    """Damage both copies in different places: neither may replace the other, and both must be reported."""
    rig = Rig()
    rig.copies.upload_part(rig.refs[1].stem + DATA)
    rig.flip(rig.path(1), at)
    rig.flip(rig.path(1, "/cold"), PAYLOAD + 64)
    before = rig.read(rig.path(1)), rig.read(rig.path(1, "/cold"))
    if not rig.scrub(1, heals=True):
        return "damage in both copies is said to be healed"
    rig.move()
    after = rig.read(rig.path(1)), rig.read(rig.path(1, "/cold"))
    return "" if before == after else "one rotten copy was put in the place of another"


def backed_up(specimen: Specimen, changed: dict[str, bytes], scratch: Path) -> str:
    """Run `ringlog backup` on a stopped engine; return a description of the problem.

    With damaged files it must exit with status DAMAGE, without damage with status DONE.
    """
    source, target = scratch / "source", scratch / "backup"
    for tree in (source, target):
        shutil.rmtree(tree, ignore_errors=True)
    source.mkdir()
    changed_too = {**specimen.files, **changed}
    write_files({path: data for path, data in changed_too.items() if path.startswith(DATA_DIR + "/")}, source)
    status = ringlog_command(
        ["backup", "--data-dir", str(source / DATA_DIR[1:]), "--to", str(target), "--cold-dir", ""]
    )
    if not changed:
        return "" if status == CliExit.DONE else f"a sound directory is not backed up: status {status}"
    return "" if status == CliExit.DAMAGE else f"damage was not refused as such: status {status}"
