"""`python -m actors.gateway <boot>`: started by the supervisor."""

from __future__ import annotations

from actors.gateway.shell import Listeners, Shell
from ringlog import config
from ringlog.envelope.boot import ActorBoot
from ringlog.link.curve import read_key_file
from ringlog.runtime.process import main


def build(boot: ActorBoot) -> Shell:
    """Make the gateway that `boot` describes; raises ConfigError when it must not listen."""
    settings = config.from_plain(boot.config)
    listeners = Listeners()
    if settings.native.endpoint != "ipc":
        server_key = read_key_file(settings.native.curve_key_file, needs_secret=True)
        listeners = Listeners(settings.native.endpoint, server_key, settings.auth.keys_file)
    return Shell(boot, listeners, ring_bytes=settings.run.ring_bytes)


if __name__ == "__main__":
    main(build)
