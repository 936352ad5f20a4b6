"""Program in the guest: recover the disk, send the state, then write until the kernel dies.

    python driver.py LIFE

Lines to the host: `@state` with all readable records, compressed; `@damage` for each finding of the offline
verifier before recovery; `@ack TOPIC FRAME FIRST COUNT` for each acknowledged frame; `@checkpoint` after a
checkpoint; `@error` before an exit by an exception.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from chaos.kernels import load
from chaos.rigs.hostdisk import HostDisk
from ringlog.testing.clock import ManualClock
from ringlog.verify.directory import verify_directory
from ringlog.verify.findings import DAMAGE
from tests.support.shard_world import World
from tests.support.world_checkpoints import checkpoint

ROOT = Path("/mnt/disk/ringlog")
INCARNATIONS_A_LIFE = 8
FRAMES_MAX = 100_000
"""Upper limit of frames in one life. The host kills a guest much earlier."""
FILE_BYTES = 256 << 10


def say(text: str) -> None:
    """Send one line to the host immediately."""
    os.write(1, text.encode() + b"\n")


def state_of(world: World) -> dict[str, Any]:
    """Return each topic with all records that a reader gets, its head, and its announced losses."""
    found = {}
    for name in load.TOPICS:
        topic = world.runs[0].core.directory.find(name)
        if topic is not None:
            records = [(seq, load.tag_of(payload)) for seq, payload in world.records(name)]
            found[name] = {"records": records, "lost": topic.lost, "head": topic.head_seq}
    return found


def recovered(life: int) -> World:
    """Start a shard on the disk. Each life has another boot id, and greater incarnations and salts."""
    disk = HostDisk(ROOT)
    world = World(
        disk, file_bytes=FILE_BYTES, incarnation=life * INCARNATIONS_A_LIFE,
        boot_id=b"boot" + life.to_bytes(12, "big"), clock=ManualClock(time.time_ns() // 1_000),
    )  # fmt: skip
    world._salt = life << 20
    world.start()
    return world


def write(world: World, life: int) -> None:
    """Append frames and send an ack for each, with checkpoints in between, until the guest is killed."""
    for name, durability in zip(load.TOPICS, ("fsync", "disk"), strict=True):
        world.put_topic(name, durability=durability)
    for frame in range(FRAMES_MAX):
        name = load.topic_of(frame)
        first = world.append(name, load.payloads_of(life, frame), producer=life + 1, seq=frame + 1)
        say(f"@ack {name} {frame} {first} {load.count_of(life, frame)}")
        world.clock.advance(0.01)
        if frame % load.CHECKPOINT_EVERY == load.CHECKPOINT_EVERY - 1:
            checkpoint(world, own_segment_bytes=0, compression="lz4")
            say("@checkpoint")
        elif frame % 7 == 0:
            world.tick(0.15)


def main() -> None:
    """Verify the disk, recover, send the state, then write."""
    life = int(sys.argv[1])
    is_new = not ROOT.exists()
    ROOT.mkdir(mode=0o700, exist_ok=True)
    (ROOT / "meta").mkdir(mode=0o700, exist_ok=True)
    if not is_new and (ROOT / "wal").is_dir():
        for finding in verify_directory(str(ROOT), jobs=1).findings:
            if finding.severity == DAMAGE:
                say(f"@damage {finding.path} at {finding.offset}: {finding.what}")
    world = recovered(life)
    packed = base64.b64encode(zlib.compress(json.dumps(state_of(world)).encode())).decode()
    say(f"@state {packed}")
    write(world, life)


if __name__ == "__main__":
    try:
        main()
    except BaseException as e:
        say(f"@error {type(e).__name__}: {e}".replace("\n", " "))
        raise
