"""Held requests: those without a reply yet, and their limits for a connection, a key, and in total. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ringlog.access.keys import Principal
from ringlog.actors.gateway import events as ev
from ringlog.actors.gateway.flows import GatewayRequest
from ringlog.errors import Throttled
from ringlog.limits import (
    GATEWAY_BYTES_MAX,
    GATEWAY_BYTES_PER_CONNECTION_MAX,
    GATEWAY_REQUESTS_PER_CONNECTION_MAX,
    GATEWAY_REQUESTS_PER_KEY_MAX,
)

_RETRY_AFTER_MS = 50


class HeldRequests:
    """The requests without a reply yet. They never exceed the limits (G5)."""

    def __init__(self) -> None:
        self._held: dict[GatewayRequest, None] = {}
        self._per_client: dict[bytes, list[int]] = {}
        """Number of requests and bytes by client."""
        self._per_key: dict[str, int] = {}
        self.bytes: int = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[GatewayRequest]:
        return iter(self._held)

    def of_client(self, client: bytes) -> list[GatewayRequest]:
        """Return the requests of a client."""
        return [request for request in self._held if request.client == client]

    def require_room(self, received: ev.ClientRequestReceived, principal: Principal) -> None:
        """Raise Throttled if the request would exceed a limit (G5)."""
        count, held_bytes = self._per_client.get(received.client, (0, 0))
        size = len(received.attachment) if received.attachment is not None else 0
        for name, found, most in (
            ("requests_per_connection", count + 1, GATEWAY_REQUESTS_PER_CONNECTION_MAX),
            ("bytes_per_connection", held_bytes + size, GATEWAY_BYTES_PER_CONNECTION_MAX),
            ("requests_per_key", self._per_key.get(principal.name, 0) + 1, GATEWAY_REQUESTS_PER_KEY_MAX),
            ("bytes", self.bytes + size, GATEWAY_BYTES_MAX),
        ):
            if found > most:
                raise Throttled(
                    "too many requests or bytes in flight, retry later", limit=name, max=most,
                    retry_after_ms=_RETRY_AFTER_MS,
                )  # fmt: skip

    def add(self, request: GatewayRequest) -> None:
        """Hold a request."""
        self._held[request] = None
        usage = self._per_client.setdefault(request.client, [0, 0])
        usage[0] += 1
        usage[1] += request.bytes
        self._per_key[request.principal.name] = self._per_key.get(request.principal.name, 0) + 1
        self.bytes += request.bytes

    def release(self, request: GatewayRequest) -> None:
        """Remove a request that gets its reply, or none."""
        del self._held[request]
        usage = self._per_client[request.client]
        usage[0] -= 1
        usage[1] -= request.bytes
        if not usage[0]:
            del self._per_client[request.client]
        self._per_key[request.principal.name] -= 1
        if not self._per_key[request.principal.name]:
            del self._per_key[request.principal.name]
        self.bytes -= request.bytes

    def check(self) -> None:
        """Check with a recount that held requests do not exceed the limits (G5)."""
        assert self.bytes == sum(request.bytes for request in self._held)
        assert sum(count for count, _ in self._per_client.values()) == len(self._held)
        assert sum(self._per_key.values()) == len(self._held)
        assert self.bytes <= GATEWAY_BYTES_MAX
