"""`python -m ringlog.actors.gateway <boot>`: entry point for the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.gateway.front_end.sockets import Listeners
from ringlog.actors.gateway.shell import GatewayShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> GatewayShell:
    """Create the gateway that `boot` describes; raise ConfigError if no listener is configured."""
    settings = config.from_plain(boot.config)
    return GatewayShell(
        boot, Listeners.from_config(settings), settings.limits, ring_bytes=settings.run.ring_bytes,
        schedulers=settings.delivery.schedulers, is_governed=settings.governor.enabled,
        drain_s=settings.supervisor.drain_s,
    )  # fmt: skip


if __name__ == "__main__":
    main(build)
