"""`python -m ringlog.actors.relocator <boot>`: entry point for the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.relocator.shell import RelocatorShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> RelocatorShell:
    """Create the relocator that `boot` describes; raise ConfigError if its store cannot be used."""
    return RelocatorShell(boot, config.from_plain(boot.config))


if __name__ == "__main__":
    main(build)
