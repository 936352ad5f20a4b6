"""`python -m ringlog.actors.compactor <boot>`: entry point for the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.compactor.shell import CompactorShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> CompactorShell:
    """Create the compactor that `boot` describes."""
    return CompactorShell(boot, config.from_plain(boot.config))


if __name__ == "__main__":
    main(build)
