"""`python -m ringlog.actors.http_gateway <boot>`: entry point for the supervisor."""

from __future__ import annotations

from ringlog import config
from ringlog.actors.http_gateway.shell import HttpGatewayShell
from ringlog.envelope.boot import ActorBoot
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> HttpGatewayShell:
    """Create the HTTP gateway that `boot` describes. Raises ConfigError if the server is not installed."""
    return HttpGatewayShell(boot, config.from_plain(boot.config))


if __name__ == "__main__":
    main(build)
