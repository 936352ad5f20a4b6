"""The process behind a block store: it serves one file by FUSE, fails on request and records every write.

blockstore.py starts it with two descriptors (/dev/fuse and a control socket) and the path of the image. It is
a separate process, because a process that waits for the device must not be the one that serves it. It imports
only the standard library.

Writes go to private pages over the image file, so that the device can return to any earlier state (`show`).
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import json
import mmap
import os
import select
import socket
import sys
import time
from typing import Any

from chaos.rigs import fuse
from ringlog.hardening import die_with_parent

ENTRIES_MAX = 200_000
"""Maximum number of recorded writes and flushes. Further ones are not recorded."""
CONTROL_BYTES_MAX = 8 << 20
MODES = ("ok", "write_eio", "read_eio", "drop", "dead")
_NEVER_S = 3600.0
_CLONE_NEWNS, _MS_REC_PRIVATE, _MNT_DETACH = 0x20000, 0x44000, 2

Entry = tuple[int, int, int, bytes]
"""(1 for a write, 0 for a flush; monotonic time of the reply in ns; offset; bytes)."""


class Server:
    """One device.

    Mode `ok` works normally, `drop` reports success without effect, `dead` fails everything.
    """

    def __init__(self, fd: int, control: socket.socket, image: str) -> None:
        self._fd, self._control = fd, control
        self._image = os.open(image, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._image).st_size
        self._pages = mmap.mmap(self._image, self._size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._mode, self._delay_s, self._low, self._high = "ok", 0.0, 0, self._size
        self._late: list[tuple[float, int, bytes | memoryview, int]] = []
        self._log: list[Entry] = []
        self._written: set[int] = set()
        """Pages written since the image file last equalled the shown state."""
        self._is_recording = False
        self._base = 0
        self._seen = {"writes": 0, "reads": 0, "flushes": 0, "write_errors": 0, "read_errors": 0, "late": 0}
        self._asked = b""

    def serve(self) -> None:
        """Serve until the file system is unmounted or the control socket closes."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        while True:
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, unique, body, error = heapq.heappop(self._late)
                fuse.reply(self._fd, unique, body, error)
            wait_s = min(self._late[0][0] - now, _NEVER_S) if self._late else _NEVER_S
            for fd, events in poll.poll(max(wait_s, 0.0) * 1000):
                if fd == self._fd and (events & (select.POLLERR | select.POLLHUP) or not self._serve_one()):
                    return
                if fd != self._fd and not self._obey():
                    return

    # -- the kernel -----------------------------------------------------------------------------------

    def _serve_one(self) -> bool:
        request = fuse.receive(self._fd)
        if request is None:
            return False
        if request.opcode in {fuse.FORGET, fuse.BATCH_FORGET, fuse.INTERRUPT}:
            return True
        body, error = self._answer(request)
        if self._delay_s and request.opcode == fuse.FSYNC:
            self._seen["late"] += 1
            heapq.heappush(self._late, (time.monotonic() + self._delay_s, request.unique, body, error))
        else:
            fuse.reply(self._fd, request.unique, body, error)
        return request.opcode != fuse.DESTROY

    def _answer(self, request: fuse.Request) -> tuple[bytes | memoryview, int]:
        match request.opcode:
            case fuse.READ:
                return self._read(*request.range())
            case fuse.WRITE:
                return self._write(request.range()[0], request.data())
            case fuse.FSYNC:
                return self._flush()
            case fuse.GETATTR | fuse.SETATTR:
                return fuse.attributes_body(request.node, self._size), 0
            case fuse.LOOKUP if bytes(request.body).rstrip(b"\0") == fuse.FILE_NAME:
                return fuse.entry_body(self._size), 0
            case fuse.LOOKUP:
                return b"", errno.ENOENT
            case fuse.OPEN:
                return fuse.OPEN_BODY, 0
            case fuse.INIT:
                return fuse.init_body(), 0
            case fuse.STATFS:
                return fuse.STATFS_BODY, 0
            case fuse.RELEASE | fuse.FLUSH | fuse.DESTROY:
                return b"", 0
            case _:
                return b"", errno.ENOSYS

    def _fails(self, mode: str, offset: int, size: int) -> bool:
        return self._mode == "dead" or (
            self._mode == mode and offset < self._high and offset + size > self._low
        )

    def _read(self, offset: int, size: int) -> tuple[bytes | memoryview, int]:
        self._seen["reads"] += 1
        if self._fails("read_eio", offset, size):
            self._seen["read_errors"] += 1
            return b"", errno.EIO
        return self._pages[offset : offset + size], 0

    def _write(self, offset: int, data: memoryview) -> tuple[bytes, int]:
        self._seen["writes"] += 1
        if self._fails("write_eio", offset, len(data)):
            self._seen["write_errors"] += 1
            return b"", errno.EIO
        if offset + len(data) > self._size:
            return b"", errno.ENOSPC
        if self._mode != "drop":
            self._pages[offset : offset + len(data)] = bytes(data)
            self._written.update(range(offset // mmap.PAGESIZE, -(-(offset + len(data)) // mmap.PAGESIZE)))
            self._remember((1, time.monotonic_ns(), offset, bytes(data)))
        return fuse.written_body(len(data)), 0

    def _flush(self) -> tuple[bytes, int]:
        self._seen["flushes"] += 1
        if self._mode in {"dead", "write_eio"} and (self._low, self._high) == (0, self._size):
            self._seen["write_errors"] += 1
            return b"", errno.EIO
        if self._mode != "drop":
            self._remember((0, time.monotonic_ns(), 0, b""))
        return b"", 0

    def _remember(self, entry: Entry) -> None:
        if self._is_recording and len(self._log) < ENTRIES_MAX:
            self._log.append(entry)

    # -- control --------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        data = self._control.recv(1 << 16)
        if not data or len(self._asked) > CONTROL_BYTES_MAX:
            return False
        *lines, self._asked = (self._asked + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            answer = getattr(self, f"do_{asked.pop('do')}")(**asked)
            self._control.sendall(json.dumps(answer).encode() + b"\n")
        return True

    def do_mode(self, mode: str, delay_s: float, low: int, high: int) -> None:
        """Set the mode. Errors affect only requests that touch [low, high); a `high` of 0 means the end."""
        self._mode, self._delay_s, self._low, self._high = mode, delay_s, low, high or self._size

    def do_seen(self) -> dict[str, int]:
        """Return the counts of events."""
        return self._seen

    def do_record(self) -> None:
        """Start to record writes and flushes. The present state is the base of `show`."""
        # Copy all writes so far into the image; `show` drops the private pages.
        for page in self._written:
            at = page * mmap.PAGESIZE
            os.pwrite(self._image, self._pages[at : at + mmap.PAGESIZE], at)
        self._written.clear()
        self._pages.madvise(mmap.MADV_DONTNEED)
        self._log, self._base, self._is_recording = [], 0, True

    def do_stop(self) -> list[tuple[int, int, int, int]]:
        """Stop recording. Returns (1 for a write, time in ns, offset, length) of each entry."""
        self._is_recording = False
        return [(kind, at_ns, offset, len(data)) for kind, at_ns, offset, data in self._log]

    def do_show(self, base: int, extra: list[int], last_bytes: int) -> None:
        """Show the image after the first `base` entries and the `extra` ones.

        If `last_bytes` is not 0, the last extra entry is cut to that length. `base` never decreases, because
        the image file follows it.
        """
        if base < self._base:
            raise ValueError(f"state {base} is before {self._base}")
        self._pages.madvise(mmap.MADV_DONTNEED)
        for _, _, offset, data in self._log[self._base : base]:
            if data:
                os.pwrite(self._image, data, offset)
        self._base = base
        for index in extra:
            _, _, offset, data = self._log[index]
            data = data[:last_bytes] if last_bytes and index == extra[-1] else data
            self._pages[offset : offset + len(data)] = data


def leave_mounts() -> None:
    """Leave the mount namespace of the parent, with no reference to its file systems. Raises OSError.

    After a kill this process could otherwise be the last one in the namespace. Its end would unmount the file
    system, which waits for the device, which this process serves: it would hang, and every sync(2) with it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, _MS_REC_PRIVATE, None) != 0:
        raise OSError(ctypes.get_errno(), "the mount namespace could not be left")
    with open("/proc/self/mountinfo", "rb") as mounts:
        rows = mounts.read().splitlines()
    for row in reversed(rows):
        place, _, source = row.partition(b" - ")
        kind, device = source.split()[:2]
        if kind == b"fuse" or device.startswith(b"/dev/loop"):
            libc.umount2(place.split()[4], _MNT_DETACH)


def main(args: list[str]) -> Any:
    """Arguments: pid of the parent, descriptors of /dev/fuse and the control socket, path of the image."""
    parent, fd, control, image = int(args[0]), int(args[1]), int(args[2]), args[3]
    if die_with_parent(parent):
        server = Server(fd, socket.socket(fileno=control), image)
        leave_mounts()
        server.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
