"""Whether processors may be kept from halting here, and when they are. Pure.

The Linux kernel does the same for a guest, for 50 to 200 us after a processor has gone idle (`haltpoll`);
what it saves is what waking a halted processor takes, at each of the four or five times that one process
wakes another between an append and a reader's hands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringlog.limits import HALT_POLL_CPUS_MAX

_NS_PER_MS = 1_000_000
LOOK_NS = 5 * _NS_PER_MS
"""How often one looks for traffic while there was some within the last second."""
LOOK_IDLE_NS = 20 * _NS_PER_MS
"""And when there was none for longer: fifty looks a second, a thousandth of a processor."""
RECENT_NS = 1_000 * _NS_PER_MS

UNIFIED = "/sys/fs/cgroup"
"""Where control groups are mounted; those of the first version have a directory for each controller."""

Read = Callable[[str], str]
"""The text of a file; "" for one that is not there."""


def obstacle(cpus: int, can_linger: bool, limited_group: str) -> str:
    """Why nothing is to be kept awake, for whoever asked for it; "" when nothing speaks against it."""
    if not can_linger:
        return "the compiled kernel is not there"
    if cpus > HALT_POLL_CPUS_MAX:
        return f"{cpus} processors are allowed, over {HALT_POLL_CPUS_MAX}: give the engine a set of its own"
    if limited_group:
        return f"control group {limited_group} has a quota of processor time, which would be spent on it"
    return ""


def group_with_quota(own_groups: str, read: Read) -> str:
    """The control group among ours and those above it that may use so much processor time and no more; or "".

    `own_groups`: /proc/self/cgroup. A container sees its own group as the root.
    """
    for line in own_groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if number == "0" and not controllers:
            found = _limited(path, lambda at: read(f"{UNIFIED}{at}/cpu.max").split()[:1] not in ([], ["max"]))
        elif "cpu" in names:
            found = _limited(path, lambda at, c=controllers: _has_old_quota(read, c, at))  # type: ignore[misc]
        else:
            continue
        if found:
            return found
    return ""


def _has_old_quota(read: Read, controllers: str, at: str) -> bool:
    text = read(f"{UNIFIED}/{controllers}{at}/cpu.cfs_quota_us").strip()
    return text.isdigit() and int(text) > 0


def _limited(path: str, is_limited: Callable[[str], bool]) -> str:
    """The nearest group from `path` upwards that is limited, or ""."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        at = "".join(f"/{part}" for part in parts[:depth])
        if is_limited(at):
            return at or "/"
    return ""


class Traffic:
    """Says, of counters looked at now and then, whether something happened lately."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._known: tuple[int, ...] | None = None
        self._changed_ns = -RECENT_NS

    def is_there(self, counters: Sequence[int], now_ns: int) -> bool:
        """Did one of `counters` change at a look at most a window ago? The first look finds no change."""
        found = tuple(counters)
        if self._known is not None and found != self._known:
            self._changed_ns = now_ns
        self._known = found
        return now_ns - self._changed_ns < self._window_ns

    def rest_ns(self, now_ns: int) -> int:
        """How long until the next look."""
        quiet_ns = now_ns - self._changed_ns
        if quiet_ns < self._window_ns:
            return max(_NS_PER_MS, min(LOOK_NS, self._window_ns // 2))
        return LOOK_NS if quiet_ns < RECENT_NS else LOOK_IDLE_NS
