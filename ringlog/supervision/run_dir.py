"""The directories of a running engine: check, create, announce, remove.

`data_dir` and `run_dir` must belong to the engine's user with mode 0700. Otherwise the start is refused with
the fix. Every start creates a new `shm_dir` below /dev/shm, with random bits in its name. Clients find the
engine through `<run_dir>/engine.json`, which is written when the engine is ready.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable

import msgspec

from ringlog.board.layout import BOARD_NAME
from ringlog.clock import Clock
from ringlog.entropy import random_hex
from ringlog.envelope.engine_file import ENGINE_FILE, EngineInfo
from ringlog.errors import DiskError, NotConnected, StartRefused
from ringlog.storage.disk import Disk, replace_file

SHM_ROOT = "/dev/shm"
RUN_LOCK = "run.lock"
"""Locked while an engine uses the run directory. The kernel releases it when the supervisor ends, however
it ends. Never removed: an engine could hold the lock of a file that others no longer see."""
STARTING_JSON = "starting.json"
TIME_JSON = "time.json"
GATEWAY_SOCKET = "gateway.sock"
SOCKET_PATH_BYTES_MAX = 107
"""Longest path in bytes that the kernel accepts for a socket."""
_ENGINE_JSON_BYTES_MAX = 65_536
_SHM_TRIES = 16


class TimeBase(msgspec.Struct, frozen=True):
    """Contents of time.json: wall time minus monotonic time, in µs, at the first start since the boot."""

    boot_id: str
    base_us: int


def require_private_dir(path: str, what: str) -> None:
    """Raise StartRefused unless `path` is a directory of the engine's user that no other user can enter."""
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode):
        raise StartRefused(f"{what} is not a directory", dir=path)
    if facts.st_uid != os.geteuid():
        raise StartRefused(
            f"{what} belongs to another user: run the engine as its owner, or change the owner",
            dir=path,
            uid=facts.st_uid,
            ours=os.geteuid(),
        )
    if facts.st_mode & 0o077:
        mode = oct(stat.S_IMODE(facts.st_mode))
        raise StartRefused(f"{what} must have mode 0700; run: chmod 700 {path}", dir=path, mode=mode)


def make_private_dir(disk: Disk, path: str, what: str) -> None:
    """Create a directory with mode 0700 if it does not exist, and check it.

    Raises StartRefused, also if the parent does not exist.
    """
    if not os.path.isdir(os.path.dirname(path)):
        raise StartRefused(f"the parent directory of the {what} does not exist; create it first", dir=path)
    try:
        if not os.path.lexists(path):
            disk.make_dir(path)
    except DiskError as e:
        raise StartRefused(
            f"{what} cannot be created", dir=path, reason=e.detail.get("strerror", "")
        ) from None
    require_private_dir(path, what)


# -- shared memory ------------------------------------------------------------------------------------


def shm_pattern() -> re.Pattern[str]:
    """Return a pattern of the shared-memory directories that an engine of this user creates."""
    return re.compile(rf"^{SHM_ROOT}/ringlog-{os.geteuid()}-[0-9a-f]{{8}}$")


def make_shm_dir(record: Callable[[str], None]) -> str:
    """Create a new shared-memory directory and return its path. Raises StartRefused.

    `record(path)` must make the name durable before the directory exists. A crash in between leaves a
    record without a directory, and never a directory without a record.
    """
    for _ in range(_SHM_TRIES):
        path = f"{SHM_ROOT}/ringlog-{os.geteuid()}-{random_hex(4)}"
        if os.path.lexists(path):
            continue
        record(path)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as e:
            raise StartRefused("shared memory cannot be used", dir=path, reason=e.strerror) from None
        return path
    raise StartRefused(
        "no unused directory name in /dev/shm; remove stale ringlog-* directories", dir=SHM_ROOT
    )


def require_shm_space(needed: int) -> None:
    """Raise StartRefused, with the remedies, if /dev/shm has less than `needed` free bytes."""
    facts = os.statvfs(SHM_ROOT)
    free = facts.f_bavail * facts.f_frsize
    if free < needed:
        raise StartRefused(
            "/dev/shm is too small: give it more room (containers: --shm-size=1g) or lower run.ring_bytes "
            "or wal.shards",
            free_bytes=free,
            needed_bytes=needed,
        )


def open_liveness_lock(shm_dir: str) -> int:
    """Return a descriptor with a shared lock on the board, which every child inherits. Raises StartRefused.

    The kernel releases the lock only when the last process with the descriptor dies. The lock therefore
    covers a child from before its first instruction to after its last one, however slowly it starts or ends.
    """
    try:
        fd = os.open(os.path.join(shm_dir, BOARD_NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise StartRefused("the board cannot be opened", dir=shm_dir, reason=e.strerror) from None
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def orphans_alive(shm_dir: str) -> bool:
    """Return whether a process of the engine that used this directory is alive: each locks the board."""
    try:
        fd = os.open(os.path.join(shm_dir, BOARD_NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def is_stale_shm_dir(path: str) -> bool:
    """Return whether `path` is a shared-memory directory of this user, with an engine's name, and no link."""
    if not shm_pattern().match(path):
        return False
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def remove_shm_dir(path: str) -> None:
    """Remove a shared-memory directory with its contents. Ignores a path that `is_stale_shm_dir` rejects."""
    if is_stale_shm_dir(path):
        shutil.rmtree(path, ignore_errors=True)


# -- engine.json --------------------------------------------------------------------------------------


def write_engine_json(disk: Disk, run_dir: str, info: EngineInfo) -> None:
    """Replace engine.json: the engine is ready. Removes starting.json. Raises DiskError."""
    replace_file(disk, run_dir, ENGINE_FILE, msgspec.json.encode(info))
    with contextlib.suppress(DiskError):
        disk.unlink(os.path.join(run_dir, STARTING_JSON))


def write_starting_json(disk: Disk, run_dir: str, info: EngineInfo) -> None:
    """Write starting.json for an engine that recovers, so that `ringlog status` works. Clients ignore it."""
    replace_file(disk, run_dir, STARTING_JSON, msgspec.json.encode(info))


def remove_announcements(disk: Disk, run_dir: str) -> None:
    """Remove engine.json, starting.json and the gateway's socket if they exist."""
    for name in (ENGINE_FILE, STARTING_JSON, GATEWAY_SOCKET):
        with contextlib.suppress(DiskError):
            disk.unlink(os.path.join(run_dir, name))


def is_of_another_start(run_dir: str, start_id: str) -> bool:
    """Return whether another start than this one is announced, as after a removal of the directory."""
    try:
        return read_engine_json(run_dir).start_id != start_id
    except NotConnected:
        return False


def gateway_socket(run_dir: str, shm_dir: str) -> str:
    """Return the path of the gateway's local socket.

    The socket is in the run directory, which a program in another container may share without /dev/shm. If
    that path is too long for a socket, the socket is in shared memory.
    """
    path = os.path.join(run_dir, GATEWAY_SOCKET)
    is_short = len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX
    return path if is_short else os.path.join(shm_dir, GATEWAY_SOCKET)


def announced_gateway(run_dir: str, shm_dir: str) -> str:
    """Return the socket's address for engine.json: relative to the run directory if possible.

    A program may see the run directory under another path.
    """
    path = gateway_socket(run_dir, shm_dir)
    return GATEWAY_SOCKET if os.path.dirname(path) == run_dir else f"ipc://{path}"


def read_engine_json(run_dir: str) -> EngineInfo:
    """Return engine.json, or the starting.json of an engine that is not ready.

    Raises NotConnected if neither file exists or the file does not decode.
    """
    path = os.path.join(run_dir, ENGINE_FILE)
    if not os.path.exists(path) and os.path.exists(os.path.join(run_dir, STARTING_JSON)):
        path = os.path.join(run_dir, STARTING_JSON)
    try:
        with open(path, "rb") as file:
            data = file.read(_ENGINE_JSON_BYTES_MAX)
    except OSError as e:
        raise NotConnected("no engine is running here", file=path, reason=e.strerror) from None
    try:
        return msgspec.json.decode(data, type=EngineInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise NotConnected("engine.json is corrupt; restart the engine", file=path, reason=str(e)) from None


# -- time.json ----------------------------------------------------------------------------------------


def time_base_us(disk: Disk, run_dir: str, boot_id: str, clock: Clock) -> int:
    """Return the time base of leases and waits: wall time minus monotonic time, in µs.

    All engines of one host boot use the same value, whatever happens to the wall clock. After a boot, or if
    time.json is missing or unreadable, the value comes from the current wall clock.
    """
    try:
        with open(os.path.join(run_dir, TIME_JSON), "rb") as file:
            known = msgspec.json.decode(file.read(_ENGINE_JSON_BYTES_MAX), type=TimeBase)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        known = TimeBase("", 0)
    if known.boot_id == boot_id and known.base_us > 0:
        return known.base_us
    base_us = clock.now_us() - clock.monotonic_ns() // 1_000
    with contextlib.suppress(DiskError):
        replace_file(disk, run_dir, TIME_JSON, msgspec.json.encode(TimeBase(boot_id, base_us)))
    return base_us
