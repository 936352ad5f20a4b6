"""Who restarts when: a pure function of (spec, history, exit, now).

What each end means:

  orderly, crash, invariant, disk failed, orphaned, killed   start again: at once, and with a growing delay
                                                             when deaths follow one another within seconds
  could not boot                                             once may be chance; twice in a row without ever
                                                             being ready is poison: give up
  fenced                                                     somebody newer is alive: give up
  corrupt                                                    damage is for people to look at: give up
  read only                                                  no death (children.py): a shard comes back at
                                                             once to serve reads, and ends when it can write
  more than restart_max deaths in restart_window_s           give up

Giving up on a child leaves the others alone: its topics answer `shard_failed` (PR-12). The delay has no
jitter because a child competes with nobody for its start.
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
POISON_BOOTS = 2
RAPID_DEATH_NS = 5 * NS_PER_S
"""Deaths within this time make the next start wait; one now and then is an accident, and a pause for
clients that need not be longer than the recovery."""
EXIT_SIGNAL_BASE = 256
"""P.EXIT of a child that a signal ended is this plus the signal's number."""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How one incarnation ended."""

    status: int
    """Exit code, or minus the signal that killed it: what subprocess calls returncode."""
    was_ready: bool
    """It had been READY at some time."""
    reason: str = ""
    """What the supervisor did to it, if anything; for people."""
    has_booted: bool = True
    """It got as far as its process slot on the board. An interpreter that cannot import us does not."""

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
        """The number the board's P.EXIT holds."""
        return self.status if self.status >= 0 else EXIT_SIGNAL_BASE - self.status

    def __str__(self) -> str:
        return describe_exit(self.board_code) + (f" ({self.reason})" if self.reason else "")


def describe_exit(word: int) -> str:
    """Words for a P.EXIT: `SIGKILL`, `cannot_boot`, `exit 3`."""
    if word >= EXIT_SIGNAL_BASE:
        number = word - EXIT_SIGNAL_BASE
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return ExitCode(word).name.lower() if word in set(ExitCode) else f"exit {word}"


@dataclass(frozen=True, slots=True)
class DeathHistory:
    """What is remembered of a child's deaths."""

    deaths_ns: tuple[int, ...] = ()
    """When it died, monotonic, oldest first; only those the window may still hold."""
    failed_boots: int = 0
    """Failed boots in a row, none of them ever READY."""

    def with_death(self, spec: ChildSpec, exit: ChildExit, now_ns: int) -> DeathHistory:
        """The history with this death added and the forgotten ones dropped; bounded by restart_max + 1."""
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
    """Leave the child dead, for this reason; the others go on."""

    reason: str


Decision = RestartNow | RestartAt | GiveUp


def decide(spec: ChildSpec, history: DeathHistory, exit: ChildExit, now_ns: int) -> Decision:
    """Decide what follows a death; `history` already includes it (History.after)."""
    if exit.status == ExitCode.FENCED:
        return GiveUp("fenced: another process holds what only this child may hold")
    if exit.status == ExitCode.CORRUPT:
        return GiveUp("stored data is damaged; see the log, then `ringlog verify`")
    if history.failed_boots >= POISON_BOOTS:
        return GiveUp(f"cannot boot: failed {history.failed_boots} times in a row without ever being ready")
    deaths = len(history.deaths_ns)
    if deaths > spec.restart_max:
        return GiveUp(f"died {deaths} times in {spec.restart_window_s:g} s")
    delay_ms = backoff_ms(sum(now_ns - at < RAPID_DEATH_NS for at in history.deaths_ns) - 1)
    return RestartAt(now_ns + delay_ms * NS_PER_MS) if delay_ms else RestartNow()


def read_only_probe_ms(latches: int) -> int:
    """How long the given life in a row, from 1, that serves reads alone waits before it looks whether the
    directory takes writes again."""
    doublings = min(max(latches - 1, 0), READ_ONLY_PROBE_MS_MAX.bit_length())
    return min(READ_ONLY_PROBE_MS_MIN << doublings, READ_ONLY_PROBE_MS_MAX)


def backoff_ms(earlier_deaths: int) -> int:
    """Delay before a restart that follows so many deaths within RAPID_DEATH_NS, this one not counted."""
    if earlier_deaths <= 0:
        return 0
    # The exponent is bounded before it is used: 1 << deaths of a patient configuration is a huge number.
    doublings = min(earlier_deaths - 1, RESTART_BACKOFF_MS_MAX.bit_length())
    return min(RESTART_BACKOFF_MS_MIN << doublings, RESTART_BACKOFF_MS_MAX)
