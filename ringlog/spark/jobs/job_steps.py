"""Long writes in steps: a plan that is kept, one transaction a step, and a rate.

What a job is to write is fixed once and kept in a file under the job's name. Step k is written with
txnVersion k of an application named after the job, so a step that was written is skipped by the sink,
whatever the file says: the file only saves the work of trying. A job that died goes on where it was when it
is run again by its name.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from ringlog.clock import Clock, SystemClock
from ringlog.errors import CorruptData
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.report import SparkJobProgress
from ringlog.storage.disk import Disk, RealDisk, replace_file

JOBS_DIR = "spark-jobs"
"""Below the data directory that is written to."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
STEP_ROWS = 1_000_000
STEP_ROWS_MIN = 1_000
STEP_S = 5.0
"""With a rate: seconds' worth of rows in a step, so that pauses stay short."""
STATE_BYTES_MAX = 1 << 30
T = TypeVar("T", bound=msgspec.Struct)


class JobStateFile:
    """The file of one job. Raises DiskError."""

    def __init__(self, data_dir: str, job: str, name: str | None, disk: Disk | None = None) -> None:
        """`name` None: a new one. Raises OptionError for what cannot be the name of a file."""
        if name is not None and not NAME.fullmatch(name):
            raise OptionError("a job's name has letters, digits, . _ - and at most 128 of them", found=name)
        self.name = name or secrets.token_hex(8)
        self.app_id = f"ringlog-{job}-{self.name}"
        """txnAppId of its writes."""
        self._disk = disk or RealDisk()
        self._directory = os.path.join(data_dir, JOBS_DIR)
        self._file = f"{job}-{self.name}.json"

    def load(self, kind: type[T]) -> T | None:
        """What was kept, or None; raises CorruptData."""
        path = os.path.join(self._directory, self._file)
        if not self._disk.exists(path):
            return None
        fd = self._disk.open_read(path)
        try:
            data = self._disk.read_at(fd, min(self._disk.size(fd), STATE_BYTES_MAX), 0)
        finally:
            self._disk.close(fd)
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise CorruptData("what was kept of a job is damaged", file=path, reason=str(e)) from None

    def save(self, state: msgspec.Struct) -> None:
        """Keep this instead, durably."""
        if not self._disk.exists(self._directory):
            self._disk.make_dir(self._directory)
            self._disk.sync_dir(os.path.dirname(self._directory))
        replace_file(self._disk, self._directory, self._file, msgspec.json.encode(state))


def check_same_options(kept: Any, asked: dict[str, Any]) -> None:
    """Raises OptionError when a job of this name was begun with other options."""
    differs = {name: getattr(kept, name) for name, value in asked.items() if getattr(kept, name) != value}
    if differs:
        raise OptionError(
            "a job of this name was begun with other options: give these again, or another name", **differs
        )


def step_rows(rate: float | None) -> int:
    """Rows of a step."""
    if rate is None:
        return STEP_ROWS
    if rate <= 0:
        raise OptionError("a rate is a number of rows a second, above 0", option="rate", found=rate)
    return min(max(int(rate * STEP_S), STEP_ROWS_MIN), STEP_ROWS)


def steps(
    first: int, total: int, rows_of: Any, rate: float | None, shown: SparkJobProgress, what: str,
    clock: Clock | None = None,
) -> Iterator[int]:  # fmt: skip
    """Numbers of the steps that are left; sleeps so that no more than `rate` rows a second go."""
    clock = clock or SystemClock()
    started, written = clock.monotonic_ns(), 0
    for step in range(first, total):
        shown.show(what, step, total)
        yield step
        written += rows_of(step)
        if rate is not None and step + 1 < total:
            ahead_s = written / rate - (clock.monotonic_ns() - started) / 1e9
            if ahead_s > 0:
                clock.sleep(ahead_s)
    shown.show(what, total, total)
