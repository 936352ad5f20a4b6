"""Nothing may stay behind: processes, shared memory, mounts, loop devices, network namespaces (O7).

A class and all it starts carry a mark in their environment, so that what is left of it can be found and
told apart from what the other lane is doing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "RINGLOG_CHAOS_RUN"
SHM = Path("/dev/shm")
HELPERS_S = 30.0
"""What multiprocessing had started for a parent that has ended has ended by then, also on a busy host."""


def marked_processes(mark: str = "") -> list[psutil.Process]:
    """Living processes that carry the mark (or any, without one), this one apart."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            is_ours = any(each == wanted or (not mark and each.startswith(wanted)) for each in environ)
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def kill_marked(mark: str) -> list[str]:
    """Kill what is left; returns a line for each."""
    lines = []
    psutil.wait_procs([each for each in marked_processes(mark) if _is_helper(each)], timeout=HELPERS_S)
    for process in marked_processes(mark):
        try:
            lines.append(f"process {process.pid} left behind: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.Error:
            continue
    return lines


def _is_helper(process: psutil.Process) -> bool:
    """A tracker or worker of multiprocessing, not ours: it ends by itself, when it reads that its parent has
    ended."""
    try:
        return "from multiprocessing." in " ".join(process.cmdline())
    except psutil.Error:
        return False


def host_things() -> set[str]:
    """What exists on the host by name and could be forgotten there."""
    return {*_shared_memory(), *_loops(), *_namespaces(), *_cgroups()}


def _shared_memory() -> Iterator[str]:
    for path in SHM.iterdir():
        # Of multiprocessing, not ours, and unlinked at once: seen here only by chance.
        if not path.name.startswith("sem."):
            yield f"shared memory {path}"


def _loops() -> Iterator[str]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield f"loop device {path.parts[3]} on {path.read_text().strip()}"
        except OSError:
            continue


def _namespaces() -> Iterator[str]:
    folder = Path("/run/netns")
    if folder.is_dir():
        for path in folder.iterdir():
            yield f"network namespace {path.name}"


def _cgroups() -> Iterator[str]:
    for path in Path("/sys/fs/cgroup").glob("**/ringlog-chaos-*"):
        if path.is_dir():
            yield f"cgroup {path}"
