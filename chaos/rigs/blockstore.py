"""A block device with controlled failures: a loop device on a file that a process of the harness serves."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chaos.order import CannotRun
from chaos.rigs.blockserver import MODES
from chaos.rigs.fuse import FILE_NAME
from chaos.rigs.mount import Loop, RigError, Volume, detach, make_file_system, mount, unmount

ANSWER_S = 30.0
END_S = 10.0
ROOT = Path(__file__).parents[2]


class BlockEntry(NamedTuple):
    """A write or a flush that the device completed."""

    is_write: bool
    at_ns: int
    """Monotonic time (ns) just before the reply."""
    offset: int
    length: int


class BlockStore:
    """Client of the process that serves the device."""

    def __init__(self, image: Path, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        mountpoint.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        self._control = ours
        self._control.settimeout(ANSWER_S)
        self._answers = ours.makefile("rb")
        try:
            fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise CannotRun(f"/dev/fuse: {e.strerror}") from e
        try:
            mount("ringlog-chaos", mountpoint, "fuse", f"fd={fd},rootmode=40755,user_id=0,group_id=0")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chaos.rigs.blockserver", str(os.getpid()), str(fd),
                 str(theirs.fileno()), str(image)],
                pass_fds=(fd, theirs.fileno()), stdin=subprocess.DEVNULL, cwd=ROOT,
            )  # fmt: skip
        finally:
            os.close(fd)
            theirs.close()
        self.file = mountpoint / FILE_NAME.decode()

    def _ask(self, do: str, **arguments: Any) -> Any:
        self._control.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            raise RigError(f"the block store ended with {self._process.poll()}")
        return json.loads(line)

    def mode(self, mode: str = "ok", *, delay_s: float = 0.0, low: int = 0, high: int = 0) -> None:
        """Set how the device replies from now on: ok, write_eio, read_eio, drop or dead.

        Args:
            delay_s: delay of each flush; a sync needs one or two of them.
            low: errors affect only requests that touch [low, high).
            high: 0 means the end of the device.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        self._ask("mode", mode=mode, delay_s=delay_s, low=low, high=high)

    def seen(self) -> dict[str, int]:
        """Return counts of writes, reads, flushes, write_errors, read_errors and late."""
        found: dict[str, int] = self._ask("seen")
        return found

    def record(self) -> None:
        """Start to record every write and flush."""
        self._ask("record")

    def recorded(self) -> list[BlockEntry]:
        """Stop recording and return the entries."""
        return [BlockEntry(bool(kind), *rest) for kind, *rest in self._ask("stop")]

    def show(self, base: int, extra: Sequence[int] = (), last_bytes: int = 0) -> None:
        """Show the device after the first `base` recorded entries and the `extra` ones, the last perhaps cut.

        The device must not be mounted, and `base` must never decrease.
        """
        self._ask("show", base=base, extra=list(extra), last_bytes=last_bytes)

    def close(self) -> None:
        """Unmount and end the process."""
        try:
            unmount(self._mountpoint)
        except OSError as e:
            print(f"left mounted: {e}")
            detach(self._mountpoint)
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class StoredVolume(NamedTuple):
    """A file system on a block store."""

    store: BlockStore
    loop: Loop
    volume: Volume

    def power_cycle(self, flag: int = 2) -> None:
        """Cut the power, unmount, set the device to `ok` and mount. The page cache is empty afterwards."""
        with contextlib.suppress(OSError):  # The file system has already shut itself down.
            self.volume.cut(flag)
        self.volume.down()
        self.store.mode("ok")
        self.loop.forget()
        self.volume.up()


@contextlib.contextmanager
def stored_volume(kind: str, scratch: Path) -> Iterator[StoredVolume]:
    """Yield a new, mounted file system on a new block store."""
    image = make_file_system(kind, scratch / f"{kind}.img")
    store = BlockStore(image, scratch / f"{kind}.store")
    try:
        loop = Loop(store.file)
        try:
            found = Volume(kind, loop.device, scratch / f"{kind}.mnt")
            found.up()
            try:
                yield StoredVolume(store, loop, found)
            finally:
                store.mode("ok")
                found.give_up()
        finally:
            loop.close()
    finally:
        store.close()
        image.unlink()
