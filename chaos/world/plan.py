"""What a seed means: a world's settings, and a list of steps, each with a generator of its own.

A step that is left out changes nothing about what the others are, so a failing case can be made smaller.
Each seed switches a random subset of the faults on, each with a random weight (swarm testing): a mixture of
everything hides what needs a lot of one thing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

STEPS = 100
GAP_S = 0.145
WORK = {"append": 40, "delete": 7, "put": 4, "drop": 2, "configure": 1, "checkpoint": 8}
FAULTS = {
    "kill": 9, "kill_all": 1, "kill_supervisor": 1, "power": 2, "disk": 12, "slow": 3, "pause": 3,
    "clock": 3, "full": 2, "restart": 1, "client": 3,
}  # fmt: skip
BUSY = {"append": 40, "delete": 16, "put": 3, "drop": 3, "configure": 1, "checkpoint": 30}
"""Work of a busy seed."""
BUSY_SHARE = 0.2
"""Of the seeds: one topic, small segments, everything moves to the cold tier, and fewer faults (RF-118)."""
CLASSES = ("fsync", "disk")


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens at a moment."""

    index: int
    at_s: float
    kind: str
    salt: str

    def random(self) -> random.Random:
        """The step's own chance."""
        return random.Random(self.salt)


def is_busy(seed: int) -> bool:
    """Is it a seed that keeps storage busy?"""
    return random.Random(f"busy {seed}").random() < BUSY_SHARE


def steps_of(seed: int) -> list[Step]:
    """All steps of a seed, in order of time."""
    rng = random.Random(f"steps {seed}")
    weights: dict[str, float] = dict(BUSY if is_busy(seed) else WORK)
    for fault, weight in FAULTS.items():
        if rng.random() < 0.6:
            weights[fault] = weight * rng.choice((0.4, 1.0) if is_busy(seed) else (0.4, 1.0, 2.5))
    kinds, numbers = list(weights), list(weights.values())
    found, at_s = [], 0.3
    for index in range(STEPS):
        at_s += rng.expovariate(1 / GAP_S)
        found.append(Step(index, at_s, rng.choices(kinds, numbers)[0], f"step {seed}/{index}"))
    return found


def options_of(seed: int) -> dict[str, Any]:
    """Settings of the engine, and how its surroundings behave."""
    rng = random.Random(f"options {seed}")
    busy = {
        "shards": 1, "reshards": False, "file_bytes": 64 << 10, "own_bytes": 0, "age_ms": 200,
        "has_cold": True, "hot": rng.choice((0, 1, 2, 3)), "record_bytes": 300,
        "topics": {"a": {"durability": rng.choice(CLASSES)}},
    }  # fmt: skip
    found = {
        "shards": rng.choice((1, 1, 2, 2, 3)),
        "reshards": rng.random() < 0.5,
        "file_bytes": rng.choice((64, 128, 256)) << 10,
        "flush_ms": rng.choice((5, 50, 100)),
        "segment_bytes": rng.choice((64 << 10, 1 << 20)),
        "own_bytes": rng.choice((0, 4 << 10, 32 << 10)),
        "age_ms": rng.choice((200, 1_000, 3_000)),
        "compression": rng.choice(("none", "none", "lz4", "zstd")),
        "has_cold": rng.random() < 0.7,
        "hot": rng.choice((0, 0, 1, 2)),
        "delay_s": rng.choice((0.0002, 0.001, 0.01)),
        "switching": rng.choice((0.01, 0.05, 0.3)),
        "says_low": rng.random() < 0.5,
        "record_bytes": rng.choice((30, 300, 3_000)),
        "topics": topics_of(rng),
    }
    return found | busy if is_busy(seed) else found


def topics_of(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Names and what they are made with, the same in each life."""
    found: dict[str, dict[str, Any]] = {}
    for name in "abcde"[: rng.randrange(2, 6)]:
        config: dict[str, Any] = {"durability": rng.choice(CLASSES)}
        if rng.random() < 0.2:
            config["cap_records"] = rng.choice((5, 20, 60))
        if rng.random() < 0.15:
            config["ttl_ms"] = rng.choice((500, 4_000))
        found[name] = config
    return found
