"""`ringlog version`: print versions."""

from __future__ import annotations

import platform
from typing import Annotated

from cyclopts import Parameter

from ringlog import __version__
from ringlog.cli.options import Options
from ringlog.envelope.wire import PROTOCOL


def version(*, options: Annotated[Options, Parameter(parse=False)]) -> None:
    """Print the versions of ringlog, its protocol and Python.

    Examples
    --------
    ringlog version
    ringlog version --output json
    """
    options.printer().item(
        {"ringlog": __version__, "protocol": PROTOCOL, "python": platform.python_version()}
    )
