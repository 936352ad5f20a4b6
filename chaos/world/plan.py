"""What a seed means: a world's settings, and a list of steps, each with a generator of its own.

A step that is left out changes nothing about what the others are, so a failing case can be made smaller:
steps are left out in ever smaller pieces (Zeller's ddmin) as long as it fails in the same way. What is left
out changes the order in which tasks run, so a smaller case may fail no more although its steps would be
enough: the answer is small, not smallest. Each seed switches a random subset of the faults on, each with a
random weight (swarm testing): a mixture of everything hides what needs a lot of one thing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
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


_CASE = re.compile(r"^seed=(\d+)(?: steps=(\d+)\.\.(\d+))?(?: without=([\d,]*))?$")


class Failed(AssertionError):
    """A seed in which a promise did not hold, with the story of it."""

    def __init__(self, what: str, story: str) -> None:
        super().__init__(what)
        self.what, self.story = what, story


@dataclass(frozen=True, slots=True)
class Case:
    """A seed, and which of its steps happen."""

    seed: int
    first: int = 0
    upto: int = STEPS
    without: frozenset[int] = frozenset()

    def __str__(self) -> str:
        left_out = ",".join(map(str, sorted(self.without)))
        return f"seed={self.seed} steps={self.first}..{self.upto}" + (
            f" without={left_out}" if left_out else ""
        )

    @property
    def kept(self) -> list[int]:
        """The steps that happen."""
        return [index for index in range(self.first, self.upto) if index not in self.without]

    @classmethod
    def of(cls, seed: int, kept: list[int]) -> Case:
        """The case in which these steps happen and no others."""
        if not kept:
            return cls(seed, 0, 0)
        first, upto = min(kept), max(kept) + 1
        return cls(seed, first, upto, frozenset(range(first, upto)) - frozenset(kept))


def parse_case(text: str) -> Case:
    """Read a case; raises ValueError."""
    found = _CASE.match(text.strip())
    if found is None:
        raise ValueError(f"not a case of this class: {text!r}; like seed=1 steps=0..{STEPS} without=3,17")
    seed, first, upto, without = found.groups()
    left_out = frozenset(int(each) for each in (without or "").split(",") if each)
    return Case(int(seed), int(first or 0), int(upto or STEPS), left_out)


RUNS_MAX = 400
"""Cases tried before the smallest so far is good enough."""
KIND_WORDS = 6


def kind_of(what: str) -> str:
    """How it failed, without numbers and names that differ from run to run."""
    words = re.sub(r"[^a-zA-Z ]", " ", what).split()
    return " ".join(word for word in words if len(word) > 2 or word == "is")[: 12 * KIND_WORDS]


def shrink(case: Case, fails: Callable[[Case], str], runs_max: int = RUNS_MAX) -> Case:
    """The smallest case found that fails as `case` does; `fails` says how, or "". Raises ValueError when
    the case does not fail at all."""
    wanted = kind_of(fails(case))
    if not wanted:
        raise ValueError(f"{case} does not fail")
    kept, pieces, runs = case.kept, 2, 1
    while len(kept) > 1 and runs < runs_max:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if kind_of(fails(Case.of(case.seed, fewer))) == wanted:
                kept, pieces = fewer, max(pieces - 1, 2)
                break
            if runs >= runs_max:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(kept))
    return Case.of(case.seed, kept)
