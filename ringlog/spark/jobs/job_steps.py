"""Long writes in steps: a stored plan, one transaction per step, and a rate limit.

The work of a job is fixed once and stored in a file under the job's name. Step k is written with txnVersion k
of an application named after the job. So the sink skips a step that was already written, even if the file
does not record it; the file only avoids useless attempts. After a crash, a run with the same name continues
the job.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from ringlog.clock import Clock, SystemClock
from ringlog.errors import CorruptData
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.report import SparkJobProgress
from ringlog.storage.disk import Disk, replace_file
from ringlog.storage.real_disk import RealDisk

JOBS_DIR = "spark-jobs"
"""Directory of job files, below the data directory that is written to."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
STEP_ROWS = 1_000_000
STEP_ROWS_MIN = 1_000
STEP_S = 5.0
"""With a rate limit: seconds of rows per step, so that pauses stay short."""
STATE_BYTES_MAX = 1 << 30
T = TypeVar("T", bound=msgspec.Struct)


class JobStateFile:
    """State file of one job. Methods raise DiskError."""

    def __init__(self, data_dir: str, job: str, name: str | None, disk: Disk | None = None) -> None:
        """`name` None generates a new name. Raises OptionError if the name is not valid."""
        if name is not None and not NAME.fullmatch(name):
            raise OptionError(
                "name must have 1 to 128 characters of A-Z a-z 0-9 . _ -, the first a letter or a digit",
                found=name,
            )
        self.name: str = name or secrets.token_hex(8)
        self.app_id: str = f"ringlog-{job}-{self.name}"
        """txnAppId of the job's writes."""
        self._disk = disk or RealDisk()
        self._directory = os.path.join(data_dir, JOBS_DIR)
        self._file = f"{job}-{self.name}.json"

    def load(self, kind: type[T]) -> T | None:
        """Return the stored state, or None; raise CorruptData."""
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
            raise CorruptData("the state file of the job is damaged", file=path, reason=str(e)) from None

    def save(self, state: msgspec.Struct) -> None:
        """Replace the stored state durably."""
        if not self._disk.exists(self._directory):
            self._disk.make_dir(self._directory)
            self._disk.sync_dir(os.path.dirname(self._directory))
        replace_file(self._disk, self._directory, self._file, msgspec.json.encode(state))


def check_same_options(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise OptionError if the job of this name was started with other options; it names those."""
    differs = {name: value for name, value in kept.items() if asked.get(name) != value}
    if differs:
        raise OptionError(
            "a job of this name was started with other options: use these, or another name", **differs
        )


def step_rows(rate: float | None) -> int:
    """Return the number of rows per step for a rate in rows per second; None: no limit."""
    if rate is None:
        return STEP_ROWS
    if rate <= 0:
        raise OptionError("rate must be > 0 rows per second", option="rate", found=rate)
    return min(max(int(rate * STEP_S), STEP_ROWS_MIN), STEP_ROWS)


def steps(
    first: int, total: int, rows_of: Any, rate: float | None, shown: SparkJobProgress, what: str,
    clock: Clock | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield the numbers of the remaining steps; sleep so that at most `rate` rows per second are written."""
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
