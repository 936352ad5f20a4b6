"""Restart decisions: a pure function of (spec, history, exit, now).

  exit                                                       decision

  orderly, crash, invariant, disk failed, orphaned, killed   restart at once; with exponential backoff when
                                                             deaths follow one another within 5 s
  could not boot                                             restart once; give up after two failed boots in
                                                             a row without ever being ready
  fenced                                                     give up: another process holds the lock
  corrupt                                                    give up: a person must inspect the damage
  read only                                                  not a death (children.py): a shard restarts at
                                                             once in read-only mode, and exits when the
                                                             directory is writable
  more than restart_max deaths in restart_window_s           give up

Giving a child up does not affect the other children: requests for its topics fail with `shard_failed`. The
backoff has no jitter, because a child competes with no other process for its start.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ringlog.errors import ExitCode
from ringlog.limits import (
    READ_ONLY_PROBE_MS_MAX,
    READ_ONLY_PROBE_MS_MIN,
    RESTART_BACKOFF_MS_MAX,
    RESTART_BACKOFF_MS_MIN,
)
from ringlog.supervision.tree import ChildSpec

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
FAILED_BOOTS_MAX = 2
RAPID_DEATH_NS = 5 * NS_PER_S
"""Earlier deaths within this time (ns) delay the next start. A single death is an accident: clients should
not wait longer than the recovery takes."""
EXIT_SIGNAL_BASE = 256
"""Base of the board's P.EXIT word for a child that a signal ended: this plus the signal's number."""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How one incarnation ended."""

    status: int
    """Exit code, or minus the number of the signal: like `returncode` of subprocess."""
    was_ready: bool
    """Whether the incarnation was READY at any time."""
    reason: str = ""
    """What the supervisor did to the child, if anything. For people."""
    has_booted: bool = True
    """Whether the child reached its process slot on the board. An interpreter whose imports fail does not."""

    @property
    def is_orderly(self) -> bool:
        return self.status == ExitCode.OK

    @property
    def is_failed_boot(self) -> bool:
        if self.was_ready:
            return False
        return self.status == ExitCode.CANNOT_BOOT or (self.status == ExitCode.CRASH and not self.has_booted)

    @property
    def board_code(self) -> int:
        """The value for the board's P.EXIT word."""
        return self.status if self.status >= 0 else EXIT_SIGNAL_BASE - self.status

    def __str__(self) -> str:
        return describe_exit(self.board_code) + (f" ({self.reason})" if self.reason else "")


def describe_exit(word: int) -> str:
    """Return the text for a P.EXIT word: `SIGKILL`, `cannot_boot`, `exit 3`."""
    if word >= EXIT_SIGNAL_BASE:
        number = word - EXIT_SIGNAL_BASE
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return ExitCode(word).name.lower() if word in set(ExitCode) else f"exit {word}"


@dataclass(frozen=True, slots=True)
class DeathHistory:
    """Recent deaths of one child."""

    deaths_ns: tuple[int, ...] = ()
    """Monotonic times (ns) of the deaths within the window, oldest first."""
    failed_boots: int = 0
    """Number of consecutive failed boots."""

    def with_death(self, spec: ChildSpec, exit: ChildExit, now_ns: int) -> DeathHistory:
        """Return the history with this death, without deaths before the window. At most restart_max + 1."""
        window_ns = round(spec.restart_window_s * NS_PER_S)
        recent = [at for at in self.deaths_ns if now_ns - at < window_ns]
        return DeathHistory(
            (*recent, now_ns)[-(spec.restart_max + 1) :],
            self.failed_boots + 1 if exit.is_failed_boot else 0,
        )


@dataclass(frozen=True, slots=True)
class RestartNow:
    """Start the successor now."""


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start the successor at this monotonic time."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart the child, for this reason. Other children continue."""

    reason: str


Decision = RestartNow | RestartAt | GiveUp


def decide(spec: ChildSpec, history: DeathHistory, exit: ChildExit, now_ns: int) -> Decision:
    """Return the decision after a death. `history` must include it already (DeathHistory.with_death)."""
    if exit.status == ExitCode.FENCED:
        return GiveUp("fenced: another process holds the lock of this child")
    if exit.status == ExitCode.CORRUPT:
        return GiveUp("stored data is damaged; see the log, then `ringlog verify`")
    if history.failed_boots >= FAILED_BOOTS_MAX:
        return GiveUp(f"cannot boot: failed {history.failed_boots} times in a row without ever being ready")
    deaths = len(history.deaths_ns)
    if deaths > spec.restart_max:
        return GiveUp(f"died {deaths} times in {spec.restart_window_s:g} s")
    delay_ms = backoff_ms(sum(now_ns - at < RAPID_DEATH_NS for at in history.deaths_ns) - 1)
    return RestartAt(now_ns + delay_ms * NS_PER_MS) if delay_ms else RestartNow()


def read_only_probe_ms(read_only_starts: int) -> int:
    """Return the wait in ms before a read-only shard checks whether the directory is writable again.

    `read_only_starts` counts the consecutive read-only starts, from 1. The wait doubles with each.
    """
    doublings = min(max(read_only_starts - 1, 0), READ_ONLY_PROBE_MS_MAX.bit_length())
    return min(READ_ONLY_PROBE_MS_MIN << doublings, READ_ONLY_PROBE_MS_MAX)


def backoff_ms(earlier_deaths: int) -> int:
    """Return the delay in ms before a restart.

    `earlier_deaths` counts the deaths within RAPID_DEATH_NS, without the current one.
    """
    if earlier_deaths <= 0:
        return 0
    # Bound the exponent first: with a large restart_max, `1 << deaths` would be a huge number.
    doublings = min(earlier_deaths - 1, RESTART_BACKOFF_MS_MAX.bit_length())
    return min(RESTART_BACKOFF_MS_MIN << doublings, RESTART_BACKOFF_MS_MAX)
