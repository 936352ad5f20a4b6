"""The classes `limits`, `clocks` and `memory`: a slice of each passes, and each detects a planted bug."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import chaos.clocks
import chaos.limits
import chaos.memory
from chaos.clocks.walls import LAST_NS, Walls
from chaos.order import Account, Order
from chaos.rigs.cases import Case, run_cases
from ringlog.drill.checks import GuaranteeBroken

ROOT = Path(__file__).parent.parent.parent
CLASSES = {"clocks": chaos.clocks, "limits": chaos.limits, "memory": chaos.memory}


def order(name: str, scratch: Path, **settings: object) -> Order:
    return Order(name, 1, 1.0, scratch, settings)


def test_a_failed_case_is_a_finding_with_its_replay_name(tmp_path: Path) -> None:
    def breaks(bench: None, _: object) -> None:
        raise GuaranteeBroken("it does not hold")

    account = Account()
    run_cases(order("limits", tmp_path), account, [Case("one", ("RF-1",), breaks)], None)
    assert [(each.what, each.case) for each in account.findings] == [("it does not hold", "one:1")]


# -- the clock shim -----------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_clock_shim_changes_only_wall_clocks(tmp_path: Path) -> None:
    clocks = Walls(tmp_path)
    script = "import time; print(time.time_ns(), time.monotonic_ns(), int(time.time())); time.sleep(0.01)"

    def look() -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            env={**os.environ, "LD_PRELOAD": str(clocks.preload)},
        )  # fmt: skip
        return [int(word) for word in done.stdout.split()]

    true_ns, monotonic, _ = look()
    clocks.step(-3_600.0)
    assert true_ns - look()[0] > 3_590 * 10**9
    clocks.freeze(LAST_NS)
    bent, later, seconds = look()
    assert (bent, seconds) == (LAST_NS, LAST_NS // 10**9)
    assert 0 < later - monotonic < 60 * 10**9
    assert clocks.readings("other") > 3
    clocks.close()


# -- real engines -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "only"),
    [("memory", "second-producer"), ("memory", "foreign-ring"), ("limits", "shard-descriptors")],
)
def test_a_slice_passes_and_counts_its_work(account: Account, tmp_path: Path, name: str, only: str) -> None:
    CLASSES[name].run(order(name, tmp_path, only=only), account)
    assert account.findings == []
    assert account.counts["acks"] > 20
    assert account.counts["records_verified"] >= account.counts["acks"]
    assert account.faults


PLANT = """
import importlib.machinery, os, sys
PLANTS = {plants!r}
class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        source = self.get_source(name)
        for old, new in PLANTS[name]:
            assert old in source, (name, old)
            source = source.replace(old, new)
        return compile(source, self.path, "exec")
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in PLANTS else None
        if spec is not None:
            spec.loader = Loader(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder)
"""
"""A sitecustomize module: every process that starts with it has the planted bugs, the test process has none.
"""

FOLLOW_THE_CLOCK = {"ringlog.actors.wal_shard.commit.admission": [("max(now_us, topic.last_ts)", "now_us")]}
TELL_NOBODY = {
    "ringlog.supervision.rings": [("            self._notify_producer(ring)\n", "")],
    "ringlog.link.channel.ring_channel": [("if producer.is_removed:", "if False:")],
}
BELIEVE_BODIES = {
    "ringlog.actors.wal_shard.commit.admission": [
        ("elif run.fault:", "elif run.fault and run.fault != Fault.CORRUPT:"),
    ]
}


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "only", "plants"),
    [
        pytest.param(
            "clocks", "back", FOLLOW_THE_CLOCK, id="stamps follow the clock back",
            marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
        ),
        pytest.param("memory", "foreign-ring", TELL_NOBODY, id="a refused ring's client is not told"),
        pytest.param("memory", "hammer", BELIEVE_BODIES, id="bodies are believed"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_detected_by_its_class(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    only: str,
    plants: dict[str, list[tuple[str, str]]],
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PLANT.format(plants=plants))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(site), os.environ.get("PYTHONPATH", ""), str(ROOT)))
    )
    monkeypatch.setattr("ringlog.drill.load.SLOW_S", 6.0)
    account = Account()
    CLASSES[name].run(order(name, tmp_path, only=only), account)
    assert account.findings, "the planted bug was not noticed"
    if name == "clocks":
        assert "goes back" in account.findings[0].what
