"""`ringlog config`: what the engine would be configured to, and where each value comes from."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import Exit
from ringlog.cli.output import plain
from ringlog.config import ENVIRONMENT, LoadedConfig, load_config, parse_flags
from ringlog.environment import VARIABLES

Sets = Annotated[tuple[str, ...], Parameter(name="--set", negative=())]
Given = Annotated[Options, Parameter(parse=False)]


def show(*, config: str | None = None, sets: Sets = (), options: Given) -> None:
    """Show every setting with its value and source. Secrets are files, and their contents are never shown.

    Parameters
    ----------
    config
        Configuration file to read.
    sets
        section.key=value; may be given several times.
    """
    loaded = load_config(parse_flags(sets), config_file=config)
    warn(loaded, options)
    rows = [{"key": key, "value": value, "source": source} for key, value, source in loaded.rows()]
    options.printer().rows(rows)


def check(*, config: str | None = None, sets: Sets = (), options: Given) -> int:
    """Read the configuration as `serve` would, and fail when it is wrong or a RINGLOG_ variable is ignored.

    Parameters
    ----------
    config
        Configuration file to read.
    sets
        section.key=value; may be given several times.
    """
    from ringlog.supervision.endpoints import check_listeners

    loaded = load_config(parse_flags(sets), config_file=config)
    check_listeners(loaded.config)
    warn(loaded, options)
    state = "wrong" if loaded.warnings else "ok"
    options.printer().thing(
        {"config": state, "file": loaded.file or "none", "warnings": len(loaded.warnings)}
    )
    return Exit.USAGE if loaded.warnings else Exit.DONE


def env(*, options: Given) -> None:
    """List the environment variables that ringlog reads, and which setting each one sets."""
    loaded = load_config()
    values = {key: (value, source) for key, value, source in loaded.rows()}
    rows = [
        {"variable": variable, "key": key, "value": plain(values[key][0]), "source": values[key][1]}
        for key, variable in ENVIRONMENT.items()
    ]
    rows += [
        {"variable": name, "key": "", "value": "set" if name in os.environ else "", "source": each.what}
        for name, each in VARIABLES.items()
    ]
    options.printer().rows(rows)


def warn(loaded: LoadedConfig, options: Options) -> None:
    """Say on stderr what was odd about the configuration."""
    if not options.is_quiet:
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
