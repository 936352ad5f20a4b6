"""Spinning on words of shared memory before a sleep, and when a process does not spin."""

from __future__ import annotations

import math
import mmap
import threading
import time
from pathlib import Path

import pytest

import ringlog.spin_wait as spin_module
from ringlog.native_kernel import kernel
from ringlog.spin_wait import (
    CONTENTION_SAMPLE_NS,
    CPU_CONTENDED_SHARE,
    SPIN_WORDS_MAX,
    SpinPolicy,
    cpu_quota,
    spin_wait,
)

LONG_NS = 900_000_000
WAIT_S = 30.0


def words_of(*values: int) -> tuple[memoryview, list[memoryview]]:
    whole = memoryview(mmap.mmap(-1, 4_096)).cast("Q")
    for at, value in enumerate(values):
        whole[at] = value
    return whole, [whole[at : at + 1] for at in range(len(values))]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_word_that_already_changed_is_seen_at_once(at: int) -> None:
    whole, words = words_of(5, 6, 1 << 63)
    seen = [5, 6, 1 << 63]
    assert spin_wait(words, seen, 0) is False
    whole[at] = 7
    assert spin_wait(words, seen, LONG_NS) is True


def test_a_word_that_changes_during_the_spin_is_seen_and_other_threads_run() -> None:
    whole, words = words_of(0, 0)
    has_begun = threading.Event()

    def change() -> None:
        has_begun.wait(WAIT_S)
        whole[1] = 1

    other = threading.Thread(target=change)
    other.start()
    has_begun.set()
    tries = 0
    while not spin_wait(words, [0, 0], LONG_NS):
        tries += 1
        assert tries < WAIT_S, "the other thread cannot run while we look"
    other.join()


def test_a_spin_without_a_change_ends_after_its_time() -> None:
    _, words = words_of(3)
    began = time.monotonic_ns()
    assert spin_wait(words, [3], 2_000_000) is False
    assert time.monotonic_ns() - began >= 2_000_000


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda words, seen: (words, seen[:1], 1), ValueError),
        (lambda words, seen: (words * (SPIN_WORDS_MAX + 1), seen * (SPIN_WORDS_MAX + 1), 1), ValueError),
        (lambda words, seen: (words, seen, 1_000_000_001), ValueError),
        (lambda words, seen: (words, [-1, 0], 1), OverflowError),
        (lambda words, seen: (words, [1 << 64, 0], 1), OverflowError),
        (lambda words, seen: (words, ["0", 0], 1), TypeError),
        (lambda words, seen: ([words[0], "no buffer"], seen, 1), TypeError),
        (lambda words, seen: ([words[0], b"short"], seen, 1), ValueError),
        (lambda words, seen: ([words[0], memoryview(bytes(64))[1:]], seen, 1), ValueError),
        (lambda words, seen: (tuple(words), seen, 1), TypeError),
    ],
)
def test_invalid_arguments_are_refused_and_no_buffer_stays_exported(change, error) -> None:
    _, words = words_of(0, 0)
    with pytest.raises(error):
        kernel.look(*change(words, [0, 0]))
    for word in words:
        word.release()  # raises BufferError if the buffer is still exported


def test_a_mapping_can_be_closed_only_after_the_spin() -> None:
    mapping = mmap.mmap(-1, 4_096)
    word = memoryview(mapping).cast("Q")[:1]
    with pytest.raises(BufferError):
        mapping.close()
    assert spin_wait([word], [0], 0) is False
    word.release()
    mapping.close()


def pressure(path: Path, total_us: int) -> str:
    averages = "avg10=0.00 avg60=0.00 avg300=0.00"
    path.write_text(f"some {averages} total={total_us}\nfull {averages} total=0\n")
    return str(path)


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_module, "_processors", lambda: 2)


def test_a_process_does_not_spin_while_the_cpu_is_contended(tmp_path: Path, two_processors: None) -> None:
    file = tmp_path / "cpu"
    looking = SpinPolicy(pressure(file, 1_000_000))
    at_ns = 10 * CONTENTION_SAMPLE_NS
    assert looking.should_spin(at_ns), "nothing is known of what was before"
    share_us = int(CPU_CONTENDED_SHARE * CONTENTION_SAMPLE_NS / 1_000)
    pressure(file, 1_000_000 + share_us + 1)
    assert looking.should_spin(at_ns + CONTENTION_SAMPLE_NS - 1), "it is measured once a second"
    assert not looking.should_spin(at_ns + CONTENTION_SAMPLE_NS)
    pressure(file, 1_000_000 + 2 * share_us + 1)
    assert looking.should_spin(at_ns + 2 * CONTENTION_SAMPLE_NS)


@pytest.mark.parametrize("text", ["", "some avg10=1 total=many\n", None])
def test_a_process_spins_if_the_host_reports_no_pressure(
    tmp_path: Path, two_processors: None, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "cpu").write_text(text)
    looking = SpinPolicy(str(tmp_path / "cpu"))
    assert all(looking.should_spin(second * CONTENTION_SAMPLE_NS) for second in range(3))


def test_a_process_does_not_spin_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_module, "_processors", lambda: 1)
    assert not SpinPolicy().should_spin(CONTENTION_SAMPLE_NS)


@pytest.mark.parametrize(
    ("own", "files", "processors"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        ("0::/../other\n", {"other/cpu.max": "50000 100000"}, 0.5),
        ("4:memory:/a\n3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n"}, math.inf),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("0::/\n", {"cpu.max": "many 0\n"}, math.inf),
        ("no group at all", {"cpu.max": "1 1\n"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_cpu_quota_reads_the_limits_of_control_groups(
    own: str, files: dict[str, str], processors: float
) -> None:
    assert cpu_quota(own, lambda path: files.get(path.removeprefix("/sys/fs/cgroup/"), "")) == processors
