"""`ringlog config`: the settings that an engine would use, and the source of each value."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.options import Options
from ringlog.cli.outcome import CliExit
from ringlog.cli.output import plain
from ringlog.config_sources import LoadedConfig, load_config, parse_flags
from ringlog.environment import SETTING_VARIABLES, VARIABLES

Sets = Annotated[tuple[str, ...], Parameter(name="--set", negative=())]
Given = Annotated[Options, Parameter(parse=False)]


def show(*, config: str | None = None, sets: Sets = (), options: Given) -> None:
    """Show every setting with its value and source.

    Secrets are stored in files. Their contents are never shown.

    Parameters
    ----------
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, /etc/ringlog/ringlog.toml).
    sets
        Setting as section.key=value; may be given several times. Overrides file and environment.

    Examples
    --------
    ringlog config show
    ringlog config show --config ringlog.toml
    """
    loaded = load_config(parse_flags(sets), config_file=config)
    warn(loaded, options)
    rows = [{"key": key, "value": value, "source": source} for key, value, source in loaded.rows()]
    options.printer().rows(rows)


def check(*, config: str | None = None, sets: Sets = (), options: Given) -> int:
    """Check the configuration as `ringlog serve` reads it.

    Fails if a setting is invalid, or if there are warnings, such as an ignored RINGLOG_ variable.

    Parameters
    ----------
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, /etc/ringlog/ringlog.toml).
    sets
        Setting as section.key=value; may be given several times. Overrides file and environment.

    Examples
    --------
    ringlog config check
    ringlog config check --set wal.shards=4
    """
    from ringlog.supervision.endpoints import check_api_keys, check_listeners

    loaded = load_config(parse_flags(sets), config_file=config)
    check_listeners(loaded.config)
    check_api_keys(os.environ)
    warn(loaded, options)
    state = "wrong" if loaded.warnings else "ok"
    options.printer().item({"config": state, "file": loaded.file or "none", "warnings": len(loaded.warnings)})
    return CliExit.USAGE if loaded.warnings else CliExit.DONE


def env(*, options: Given) -> None:
    """List the environment variables that ringlog reads.

    Examples
    --------
    ringlog config env
    """
    loaded = load_config()
    values = {key: (value, source) for key, value, source in loaded.rows()}
    rows = [
        {"variable": variable, "key": key, "value": plain(values[key][0]), "source": values[key][1]}
        for key, variable in SETTING_VARIABLES.items()
    ]
    rows += [
        {
            "variable": name,
            "key": "",
            "value": "set" if name in os.environ else "",
            "source": each.description,
        }
        for name, each in VARIABLES.items()
    ]
    options.printer().rows(rows)


def warn(loaded: LoadedConfig, options: Options) -> None:
    """Print the warnings of the configuration to stderr."""
    if not options.is_quiet:
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
