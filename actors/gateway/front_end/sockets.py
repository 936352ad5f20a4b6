"""The sockets on which the gateway listens: for this host, and for TCP clients with keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from ringlog.access.key_ring import KeyRing
from ringlog.actors.gateway.front_end.zap import IPC_DOMAIN, TCP_DOMAIN, ZapHandler
from ringlog.actors.gateway.front_end.zmq_frontend import ZmqFrontend
from ringlog.config import Config
from ringlog.envelope.boot import ActorBoot
from ringlog.errors import StartRefused
from ringlog.link.curve import CurveKey, read_key_file


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where to listen and which keys to admit. An empty `tcp` means this host only."""

    tcp: str = ""
    server_key: CurveKey | None = None
    keys_file: str = ""

    @classmethod
    def from_config(cls, settings: Config) -> Listeners:
        """Create it from the configuration; read the server's key from its file. Raises ConfigError."""
        if settings.native.endpoint == "ipc":
            return cls()
        server_key = read_key_file(settings.native.curve_key_file, needs_secret=True)
        return cls(settings.native.endpoint, server_key, settings.auth.keys_file)


class GatewaySockets:
    """All sockets of the gateway, and the check of connections that libzmq asks for."""

    def __init__(self, boot: ActorBoot, listeners: Listeners, read_keys: Callable[[], KeyRing]) -> None:
        """Bind all sockets, or none. Raises StartRefused."""
        self._context: zmq.Context[Any] = zmq.Context()
        self.zap: ZapHandler = ZapHandler(self._context, read_keys)
        self.frontends: list[ZmqFrontend] = []
        bindings: list[tuple[str, bytes, str, CurveKey | None]] = [
            (f"ipc://{boot.gateway_socket}", b"i", IPC_DOMAIN, None)
        ]
        if listeners.tcp:
            bindings.insert(0, (listeners.tcp, b"t", TCP_DOMAIN, listeners.server_key))
        try:
            for endpoint, tag, domain, key in bindings:
                self.frontends.append(ZmqFrontend(self._context, endpoint, tag, domain, key))
        except StartRefused:
            self.close()
            raise

    @property
    def endpoints(self) -> list[str]:
        """The bound endpoints."""
        return [frontend.endpoint for frontend in self.frontends]

    @property
    def filenos(self) -> list[int]:
        """The descriptors to wait for."""
        return [self.zap.fileno(), *(frontend.fileno() for frontend in self.frontends)]

    @property
    def has_input(self) -> bool:
        """Whether a request can be received."""
        return any(frontend.has_input() for frontend in self.frontends)

    @property
    def has_backlog(self) -> bool:
        """Whether replies wait for their clients to receive."""
        return any(frontend.has_backlog for frontend in self.frontends)

    def close(self) -> None:
        """Close all sockets."""
        for frontend in self.frontends:
            frontend.close()
        self.zap.close()
        self._context.term()
