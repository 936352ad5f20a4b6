"""`python -m ringlog.actors.reclaimer <boot>`: entry point for the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.reclaimer.shell import ReclaimerShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> ReclaimerShell:
    """Create the reclaimer that `boot` describes; raise ConfigError if its cold store cannot be used."""
    return ReclaimerShell(boot, config.from_plain(boot.config))


if __name__ == "__main__":
    main(build)
