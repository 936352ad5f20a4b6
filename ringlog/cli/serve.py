"""`ringlog serve`: be an engine, in the foreground, until told to stop."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.outcome import Exit
from ringlog.cli.settings import Sets
from ringlog.shm import engine_trouble


def serve(
    *,
    config: str | None = None,
    data_dir: str | None = None,
    sets: Sets = (),
    check: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run the engine in the foreground; it ends in good order on SIGTERM or Ctrl-C.

    Parameters
    ----------
    config
        Configuration file (default: RINGLOG_CONFIG, ./ringlog.toml, the system's).
    data_dir
        Where the data lies; the same as --set data.dir=...
    sets
        section.key=value; may be given several times and wins over file and environment.
    check
        Only say whether the configuration is good.
    """
    trouble = engine_trouble()
    if trouble:
        print(trouble, file=sys.stderr)
        return Exit.FAILED
    from ringlog.supervision.serve import serve as run

    return run(config_file=config, sets=sets, data_dir=data_dir, check=check)
