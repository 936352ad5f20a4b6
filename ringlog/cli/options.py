"""What every command is told: where the engine is, how long to wait, how to print."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringlog.cli.output import Format, Printer
from ringlog.clock import Clock, SystemClock
from ringlog.errors import NotConnected, UsageError
from ringlog.link.address import parse_url, read_engine_file

if TYPE_CHECKING:
    from ringlog.client import Client


@dataclass(frozen=True, slots=True)
class Options:
    """Global options, read."""

    url: str | None = None
    key_file: str | None = None
    timeout_s: float = 10.0
    format: Format = Format.NDJSON
    is_quiet: bool = False
    is_colored: bool = False
    clock: Clock = field(default_factory=SystemClock)

    def printer(self) -> Printer:
        """Prints results to stdout."""
        return Printer(self.format, is_colored=self.is_colored)

    def connect(self) -> Client:
        """Connect to the engine and prove it answers; raises NotConnected and the like."""
        import ringlog

        self.require_engine()
        return ringlog.connect(
            self.url, key=self.key(), timeout_ms=round(self.timeout_s * 1000), wait=self.timeout_s
        )

    def require_engine(self) -> None:
        """Raise NotConnected at once where an engine on this host is known not to run."""
        address = parse_url(self.url)
        if address.is_local and read_engine_file(address.run_dir) is None:
            raise NotConnected("no engine is running there", run_dir=address.run_dir)

    def key(self) -> str | None:
        """The secret key of --key-file, else none: the client then looks at its own variables."""
        if self.key_file is None:
            return None
        from ringlog.link.curve import read_key_file

        return read_key_file(self.key_file, needs_secret=True).secret.decode()

    @property
    def shows_progress(self) -> bool:
        """Progress belongs on a terminal, and only there."""
        return not self.is_quiet and sys.stderr.isatty()


def choose_format(wanted: str | None) -> Format:
    """The format asked for; without a wish a table for people and ndjson for programs."""
    if wanted is None:
        return Format.TABLE if sys.stdout.isatty() else Format.NDJSON
    try:
        return Format(wanted)
    except ValueError:
        known = ", ".join(each.value for each in Format)
        raise UsageError(f"--output must be one of {known}, got {wanted!r}") from None


def wants_color(*, no_color: bool) -> bool:
    """Color on a terminal, unless somebody would rather not (also: NO_COLOR)."""
    return not no_color and not os.environ.get("NO_COLOR") and sys.stdout.isatty()
