"""Global options of every command: the address of the engine, the timeout and the output format."""

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
    """Parsed global options."""

    url: str | None = None
    key_file: str | None = None
    timeout_s: float = 10.0
    format: Format = Format.NDJSON
    is_quiet: bool = False
    is_colored: bool = False
    clock: Clock = field(default_factory=SystemClock)

    def printer(self) -> Printer:
        """Return a printer of results to stdout."""
        return Printer(self.format, is_colored=self.is_colored)

    def connect(self) -> Client:
        """Connect to the engine and wait until it replies; raise NotConnected or another connection error."""
        import ringlog

        self.require_engine()
        return ringlog.connect(
            self.url, key=self.key(), timeout_ms=round(self.timeout_s * 1000), wait=self.timeout_s
        )

    def require_engine(self) -> None:
        """Raise NotConnected at once if the engine is local and does not run."""
        address = parse_url(self.url)
        if address.is_local and read_engine_file(address.run_dir) is None:
            raise NotConnected("no engine is running there", run_dir=address.run_dir)

    def key(self) -> str | None:
        """Return the secret key in --key-file, or None: the client then uses environment variables."""
        if self.key_file is None:
            return None
        from ringlog.link.curve import read_key_file

        return read_key_file(self.key_file, needs_secret=True).secret.decode()

    @property
    def shows_progress(self) -> bool:
        """Whether to show progress: only on a terminal."""
        return not self.is_quiet and sys.stderr.isatty()


def choose_format(wanted: str | None) -> Format:
    """Return the requested format. Default: table on a terminal, else ndjson."""
    if wanted is None:
        return Format.TABLE if sys.stdout.isatty() else Format.NDJSON
    try:
        return Format(wanted)
    except ValueError:
        known = ", ".join(each.value for each in Format)
        raise UsageError(f"--output must be one of {known}, got {wanted!r}") from None


def wants_color(*, no_color: bool) -> bool:
    """Return whether to use color: on a terminal, unless --no-color or NO_COLOR is set."""
    return not no_color and not os.environ.get("NO_COLOR") and sys.stdout.isatty()
