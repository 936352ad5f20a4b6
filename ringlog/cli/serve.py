"""`ringlog serve`: run an engine in the foreground."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.outcome import CliExit
from ringlog.cli.settings import Sets
from ringlog.shm import unsupported_host_reason


def serve(
    *,
    config: str | None = None,
    data_dir: str | None = None,
    sets: Sets = (),
    check: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run the engine in the foreground until SIGTERM or Ctrl-C.

    Parameters
    ----------
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, /etc/ringlog/ringlog.toml).
    data_dir
        Data directory; the same as --set data.dir=DIR.
    sets
        Setting as section.key=value; may be given several times. Overrides file and environment.
    check
        Check the configuration and exit.

    Examples
    --------
    ringlog serve --data-dir ./ringlog-data
    ringlog serve --config ringlog.toml --set wal.shards=4
    """
    trouble = unsupported_host_reason()
    if trouble:
        print(trouble, file=sys.stderr)
        return CliExit.FAILED
    from ringlog.supervision.serve import serve as run

    return run(config_file=config, sets=sets, data_dir=data_dir, check=check)
