"""A guest kernel: User-Mode Linux in its own process group, with one disk image and a console.

Its root file system is the host's, read-only. It can write only to the image, which is mounted at GUEST_DISK.
A console line that the host has read was printed before the kernel died.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.order import CannotRun

SOURCE = Path(__file__).parent / "xstate.c"
ROOT = Path(__file__).parent.parent.parent
GUEST_DISK = "/mnt/disk"
MEMORY = "192M"
IMAGE_BYTES = 48 << 20
COMMAND_S = 30.0
LINE_BYTES_MAX = 1 << 22
"""Maximum length of a console line. A guest that prints more without a newline is treated as dead."""


def need_kernel() -> None:
    """Raise CannotRun if the guest kernel, a required program or root is missing."""
    for program, package in (("linux.uml", "user-mode-linux"), ("mkfs.ext4", "e2fsprogs"), ("gcc", "gcc")):
        if shutil.which(program) is None:
            raise CannotRun(f"{program} is not installed (package {package})")
    if os.geteuid() != 0:
        raise CannotRun("needs root, so that the guest's files on the host have the right owner: run as root")


def build_shim(scratch: Path) -> Path:
    """Compile the shim that lets User-Mode Linux run on CPUs with a large register state (xstate)."""
    shim = scratch / "xstate.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(shim), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=COMMAND_S, capture_output=True)
    return shim


def make_image(path: Path) -> None:
    """Create an image with an empty ext4 file system."""
    with path.open("wb") as out:
        out.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True, timeout=COMMAND_S, capture_output=True)


WATCHED = """
exec 3<&0 </dev/null
(read -r _; kill -KILL 0) <&3 >/dev/null 2>&1 &
exec 3<&-
exec "$0" "$@"
"""
"""Shell program that runs a command, and kills its process group once the standard input is closed: a harness
that dies, even by SIGKILL, leaves no guest behind."""


@dataclass(slots=True)
class Guest:
    """One life of a guest kernel: call `start`, read with `line`, then `kill`."""

    scratch: Path
    shim: Path
    image: Path
    name: str
    mount_options: str = "data=ordered"
    _process: subprocess.Popen[bytes] | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _held: bytes = b""

    def start(self, program: Sequence[str], environ: dict[str, str]) -> None:
        """Boot, mount the image, and run a program of the host in the guest."""
        script = self.scratch / f"{self.name}.sh"
        script.write_text(self._script(program, environ))
        script.chmod(0o700)
        command = [
            "sh", "-c", WATCHED,
            "linux.uml", f"mem={MEMORY}", "rootfstype=hostfs", "rootflags=/", "ro", f"ubd0={self.image}",
            f"init={script}", "con0=fd:0,fd:1", "con=null", "ssl=null", "quiet", "panic=1",
            f"uml_dir={self.scratch}/", f"umid={self.name}",
        ]  # fmt: skip
        host = {
            **os.environ, "LD_PRELOAD": str(self.shim), "TMPDIR": str(self.scratch),
            "HOME": str(self.scratch),
        }  # fmt: skip
        # Own session: the guest's processes are host processes, and one signal must kill all of them at once.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=host,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def _script(self, program: Sequence[str], environ: dict[str, str]) -> str:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environ.items())
        return (
            "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
            "mount -t proc proc /proc\nmount -t tmpfs none /mnt\nmkdir /mnt/disk /mnt/tmp\n"
            f"mount -t ext4 -o {self.mount_options} /dev/ubda {GUEST_DISK} || echo '@nomount'\n"
            f"cd {shlex.quote(str(ROOT))}\n"
            f"exec env TMPDIR=/mnt/tmp {settings} {shlex.join(program)}\n"
        )

    def line(self, deadline: float) -> str | None:
        """Return the next complete line of the console.

        Returns None at `deadline` (monotonic, s), after the guest died, or if a line is too long.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        while b"\n" not in self._held:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data or len(self._held) > LINE_BYTES_MAX:
                return None
            self._held += data
        found, _, self._held = self._held.partition(b"\n")
        return found.decode(errors="replace").rstrip("\r")

    def kill(self) -> list[str]:
        """Kill the whole kernel with SIGKILL; return the console lines that were not read yet."""
        process = self._process
        if process is None:
            return []
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(COMMAND_S)
        lines = []
        while (found := self.line(time.monotonic() + COMMAND_S)) is not None:
            lines.append(found)
        self._selector.close()
        if process.stdin is not None:
            process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        return lines
