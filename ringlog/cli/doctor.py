"""`ringlog doctor`: check whether this machine can run an engine, and suggest remedies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from ringlog.cli.option_parsing import human_bytes
from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.probe import existing_parent, time_syncs
from ringlog.clock import Clock
from ringlog.compilation import is_compiled
from ringlog.config import Config
from ringlog.config_sources import load_config
from ringlog.errors import DiskError
from ringlog.limits import RING_BYTES_DEFAULT
from ringlog.shm import ORDERED_MACHINES, stores_are_ordered, unsupported_host_reason

SYNCS = 100
SYNC_SLOW_MS = 20.0
OPEN_FILES_LOW = 1024
KERNEL_OLDEST = (5, 3)
"""First version with pidfd_open."""
PYTHON_OLDEST = (3, 11)
CLOCK_STEP_NS = 1_000_000
SHM_BYTES_LOW = 2 * RING_BYTES_DEFAULT
"""Two rings that have grown to the default size."""
PACKAGES = ("pyzmq", "msgspec", "msgpack", "numpy", "xxhash", "lz4", "zstandard", "psutil", "cyclopts")
OPTIONAL = ("granian", "pyarrow", "py-spy", "uvloop")
OK, WARN, BAD = "ok", "warn", "bad"


class DoctorFinding(NamedTuple):
    """Result of one check."""

    check: str
    verdict: str
    found: str
    advice: str = ""


def doctor(*, data_dir: str | None = None, options: Annotated[Options, Parameter(parse=False)]) -> int:
    """Check kernel, shared memory, limits, clock, disk, Python and packages.

    Fails if a check is bad.

    Parameters
    ----------
    data_dir
        Data directory to check (default: as configured).

    Examples
    --------
    ringlog doctor
    ringlog doctor --data-dir /var/lib/ringlog
    """
    trouble = unsupported_host_reason()
    if trouble:
        print(trouble, file=sys.stderr)
        return CliExit.FAILED
    config = load_config().config
    findings = list(examine(config, data_dir or config.data.dir, options.clock))
    options.printer().rows([finding._asdict() for finding in findings])
    return CliExit.FAILED if any(finding.verdict == BAD for finding in findings) else CliExit.DONE


def examine(config: Config, data_dir: str, clock: Clock) -> Iterator[DoctorFinding]:
    """Run all checks; yield one finding or more for each."""
    from ringlog.supervision.engine_resources import is_in_container  # Not available on every client system.

    yield check_kernel(platform.system(), platform.release())
    yield check_machine()
    yield check_python(sys.version_info[:2], platform.python_version())
    yield check_shared_memory(config)
    yield check_open_files(_open_files())
    yield check_user(os.geteuid(), is_allowed=config.run.allow_root or is_in_container())
    yield check_clock(clock)
    yield check_space(config, data_dir)
    yield check_sync(data_dir, clock)
    yield check_messaging()
    yield check_compilation(is_compiled())
    yield from check_packages(importlib.metadata.version)


def check_kernel(system: str, release: str) -> DoctorFinding:
    """Check the kernel: the supervisor monitors its children by pidfd."""
    found = f"{system} {release}"
    match = re.match(r"(\d+)\.(\d+)", release)
    if system != "Linux" or match is None or (int(match[1]), int(match[2])) < KERNEL_OLDEST:
        return DoctorFinding("kernel", BAD, found, "needs Linux 5.3 or later")
    return DoctorFinding("kernel", OK, found)


def check_machine() -> DoctorFinding:
    """Check the processor: rings need a memory model with ordered stores."""
    if stores_are_ordered():
        return DoctorFinding("processor", OK, platform.machine())
    advice = f"rings are used on {', '.join(sorted(ORDERED_MACHINES))} only; clients go by socket here"
    return DoctorFinding("processor", WARN, platform.machine(), advice)


def check_python(version: tuple[int, ...], text: str) -> DoctorFinding:
    """Check the version of Python."""
    verdict = OK if version >= PYTHON_OLDEST else BAD
    return DoctorFinding("python", verdict, text, "" if verdict == OK else "needs Python 3.11 or later")


def check_shared_memory(config: Config, path: str = "/dev/shm") -> DoctorFinding:
    """Check the tmpfs for rings and the board. Containers have 64 MiB by default."""
    from ringlog.supervision.engine_resources import needed_shm_bytes

    try:
        usage = shutil.disk_usage(path)
    except OSError as e:
        return DoctorFinding("shared memory", BAD, f"{path}: {e.strerror}", "mount a tmpfs there")
    found = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} free in {path}"
    needed = needed_shm_bytes(config)
    if usage.free < needed:
        advice = f"an engine needs {human_bytes(needed)}: --shm-size=1g for a container, or fewer wal.shards"
        return DoctorFinding("shared memory", BAD, found, advice)
    if usage.free < needed + SHM_BYTES_LOW:
        advice = "room for few rings, other clients go by socket; in a container: --shm-size=1g"
        return DoctorFinding("shared memory", WARN, found, advice)
    return DoctorFinding("shared memory", OK, found)


def _open_files() -> tuple[int, int]:
    import resource  # Not available on every client system.

    return resource.getrlimit(resource.RLIMIT_NOFILE)


def check_user(uid: int, *, is_allowed: bool) -> DoctorFinding:
    """Check the user: root is refused unless it is allowed, or the engine runs in a container."""
    if uid == 0 and not is_allowed:
        return DoctorFinding(
            "user", BAD, "root", "use another user, or set run.allow_root (RINGLOG_ALLOW_ROOT=1)"
        )
    return DoctorFinding("user", WARN if uid == 0 else OK, "root" if uid == 0 else f"uid {uid}")


def check_open_files(limits: tuple[int, int]) -> DoctorFinding:
    """Check the limit of open files: each connection and ring needs descriptors. -1 means no limit."""
    soft, hard = limits
    found = f"soft {soft}, hard {hard}"
    # The engine's processes raise their soft limit themselves. A client process does not.
    if 0 <= hard < OPEN_FILES_LOW:
        hint = "few connections before an engine takes no new ones; raise it: LimitNOFILE= of the service"
        return DoctorFinding("open files", WARN, found, hint)
    if 0 <= soft < OPEN_FILES_LOW:
        return DoctorFinding(
            "open files", WARN, found, "raise it: ulimit -n 65536, or LimitNOFILE= of the service"
        )
    return DoctorFinding("open files", OK, found)


def check_clock(clock: Clock) -> DoctorFinding:
    """Check that both clocks advance at the same rate."""
    wall, steady = clock.now_us(), clock.monotonic_ns()
    clock.sleep(0.01)
    drift_ns = (clock.now_us() - wall) * 1000 - (clock.monotonic_ns() - steady)
    found = f"wall and monotonic differ by {abs(drift_ns) / 1000:.0f} us in 10 ms"
    if abs(drift_ns) > CLOCK_STEP_NS:
        return DoctorFinding(
            "clock", WARN, found, "the wall clock is being stepped; record times may bunch up"
        )
    return DoctorFinding("clock", OK, found)


def check_space(config: Config, data_dir: str) -> DoctorFinding:
    """Check free disk space. Below the configured minimum the engine refuses writes."""
    place = existing_parent(data_dir)
    free = shutil.disk_usage(place).free
    found = f"{human_bytes(free)} free for {data_dir}"
    if free < config.data.min_free_bytes:
        return DoctorFinding(
            "disk space", BAD, found, "below data.min_free_bytes: the engine would not start"
        )
    if free < config.data.min_free_bytes + 16 * config.wal.file_bytes * config.wal.shards:
        return DoctorFinding("disk space", WARN, found, "little room for logs")
    return DoctorFinding("disk space", OK, found)


def check_sync(data_dir: str, clock: Clock) -> DoctorFinding:
    """Measure fdatasync: the lower bound of the latency of every fsync append."""
    place = existing_parent(data_dir)
    if not os.access(place, os.W_OK | os.X_OK):
        return DoctorFinding("sync", BAD, f"{place} is not writable for us", "choose another data.dir")
    try:
        times = time_syncs(place, SYNCS, clock)
    except DiskError as e:
        return DoctorFinding("sync", BAD, str(e), "the disk cannot be written")
    median, p99 = times.quantile_ms(0.5), times.quantile_ms(0.99)
    found = f"fdatasync of 4 KiB: median {median:.2f} ms, p99 {p99:.2f} ms"
    slow = "slow disk: fsync-class appends wait this long; `disk` class does not"
    return (
        DoctorFinding("sync", WARN, found, slow) if p99 > SYNC_SLOW_MS else DoctorFinding("sync", OK, found)
    )


def check_messaging() -> DoctorFinding:
    """Check CURVE: an engine serves TCP only encrypted."""
    import zmq

    found = f"libzmq {zmq.zmq_version()}, CURVE {'available' if zmq.has('curve') else 'missing'}"
    if not zmq.has("curve"):
        return DoctorFinding("messaging", WARN, found, "TCP cannot be served or used; same-host clients can")
    return DoctorFinding("messaging", OK, found)


def check_compilation(is_compiled: bool) -> DoctorFinding:
    """Report whether engine and clients run compiled modules, which halve the cost of small requests."""
    if is_compiled:
        return DoctorFinding("compiled modules", OK, "in use")
    return DoctorFinding("compiled modules", OK, "not in use: this is a source checkout", "install a wheel")


def check_packages(version_of: Callable[[str], Any]) -> Iterator[DoctorFinding]:
    """Yield the installed version of each package."""
    for name in (*PACKAGES, *OPTIONAL):
        try:
            yield DoctorFinding(f"package {name}", OK, version_of(name))
        except importlib.metadata.PackageNotFoundError:
            if name in OPTIONAL:
                yield DoctorFinding(f"package {name}", OK, "not installed", "optional")
            else:
                yield DoctorFinding(f"package {name}", BAD, "not installed", f"pip install {name}")
