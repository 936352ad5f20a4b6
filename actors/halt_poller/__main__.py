"""`python -m actors.halt_poller <boot>`: started by the supervisor."""

from __future__ import annotations

from actors.halt_poller.shell import Shell
from ringlog import config
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> Shell:
    """Make the poller that `boot` describes."""
    return Shell(boot, config.from_plain(boot.config).run.halt_poll_us)


if __name__ == "__main__":
    main(build)
