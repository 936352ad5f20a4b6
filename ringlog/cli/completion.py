"""`ringlog --install-completion`: install shell completion."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from ringlog.cli.app import build
from ringlog.cli.options import Options
from ringlog.errors import UsageError


def install(
    *,
    shell: Literal["bash", "zsh", "fish"] | None = None,
    options: Annotated[Options, Parameter(parse=False)],
) -> None:
    """Install the shell completion of ringlog.

    Adds a line to the start-up file of bash and zsh.

    Parameters
    ----------
    shell
        Shell to install it for: bash, zsh or fish (default: the shell that runs this command).

    Examples
    --------
    ringlog --install-completion
    ringlog --install-completion --shell zsh
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        found = shell or detect_shell()
    except ShellDetectionError:
        raise UsageError("the shell cannot be detected: name it with --shell bash, zsh or fish") from None
    path = build().install_completion(shell=found)
    options.printer().item({"shell": found, "script": str(path)})
