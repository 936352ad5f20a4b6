"""The RSGI application: finds the route, checks key and rights, runs the handler, and answers every error.

The order of checks: route, key, in-flight limit, rights on the names of the path, readiness, body, rights on
the names of the body. So a refusal does not tell which topics exist.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ringlog.access.keys import ANYONE, Principal
from ringlog.actors.http_gateway.api import body_compression
from ringlog.actors.http_gateway.api.error_replies import (
    HttpError,
    error_body,
    error_headers,
    status_and_code,
)
from ringlog.actors.http_gateway.api.host_check import HostCheck, require_host
from ringlog.actors.http_gateway.api.request import (
    HttpProtocol,
    Request,
    Response,
    Scope,
    authorization_of,
)
from ringlog.actors.http_gateway.api.request_body import RequestBody
from ringlog.actors.http_gateway.api.route_table import Route, RouteTable
from ringlog.actors.http_gateway.gateway import Gateway
from ringlog.actors.http_gateway.streams.connection_ledger import LEDGERS
from ringlog.actors.http_gateway.streams.web_socket import serve_web_socket
from ringlog.board.layout import ProcessField
from ringlog.errors import Internal, RinglogError, Unauthorized
from ringlog.logs import log_event

log: logging.Logger = logging.getLogger("ringlog.http_gateway")

_JSON = ("content-type", "application/json")
_REQUEST_ID_CHARS_MAX = 128
_TRACEBACK_LINES = 4
_WITHOUT_BODY = {204, 304}
"""Status of responses whose body the HTTP server drops."""
_encode = msgspec.json.Encoder(enc_hook=str).encode
KEYLESS = Principal("keyless", frozenset())
"""Principal of a probe without a key."""


def key_needed() -> Unauthorized:
    """Return a new error. One that is raised again and again would keep the frames of all requests alive."""
    return Unauthorized("the request needs a known key: Authorization: Bearer KEY")


class Application:
    """The callable that granian serves."""

    def __init__(
        self, gateway: Gateway, routes: RouteTable, find_key: Callable[[str], Principal | None]
    ) -> None:
        self.gateway: Gateway = gateway
        self.routes: RouteTable = routes
        self._find_key = find_key
        self._hosts = HostCheck(admits_all=gateway.settings.auth.allow_insecure)

    async def __rsgi__(self, scope: Scope, protocol: Any) -> None:
        """Serve one request or one WebSocket."""
        if scope.proto == "ws":
            try:
                self._check_origin(scope)
            except RinglogError as e:
                protocol.close(status_and_code(e)[0])
                return
            await serve_web_socket(self.gateway, scope, protocol, self._find_key)
            return
        await self._serve(scope, protocol)

    async def _serve(self, scope: Scope, protocol: HttpProtocol) -> None:
        begin_ns = self.gateway.clock.monotonic_ns()
        gateway = self.gateway
        gateway.slot.add(ProcessField.REQUESTS, 1)
        request_id = scope.headers.get("x-request-id") or ""
        route_name = "-"
        request_body = RequestBody(gateway, scope, protocol)
        try:
            if request_id and not (len(request_id) <= _REQUEST_ID_CHARS_MAX and request_id.isprintable()):
                request_id = ""
            principal: Principal | None = self._find_key(authorization_of(scope.headers))
            host = scope.headers.get("host") or require_host(scope.authority)
            if principal is ANYONE:
                self._hosts.require_loopback(host)
                self._require_own_page(scope)
            try:
                route, params = self.routes.find(scope.method, scope.path)
            except HttpError:
                if principal is None:
                    raise key_needed() from None  # A client without a key does not learn which routes exist.
                raise
            route_name = route.name
            if principal is None:
                principal = self._without_header(route, scope)
            request = Request(gateway, scope, protocol, request_body, route, params, principal, request_id)
            reply = await self._run(request)
        except RinglogError as e:
            reply = self._error_reply(e)
        except asyncio.CancelledError:
            raise
        except Exception as e:  # noqa: BLE001  one request must not end the gateway
            reply = self._unexpected(e, route_name, request_id)
        if reply is None:
            gateway.requests.add(route_name, 200)
            return
        status, body, headers = reply
        if not isinstance(body, bytes):
            body = self._with_performance(body, begin_ns, status)
        gateway.requests.add(route_name, status)
        sent = [_JSON, *headers] if not any(name == "content-type" for name, _ in headers) else list(headers)
        if request_id:
            sent.append(("x-request-id", request_id))
        if body_compression.is_worthwhile(body) and body_compression.accepts_gzip(
            scope.headers.get("accept-encoding") or ""
        ):
            body = await body_compression.compressed(body)
            sent += body_compression.HEADERS
        if scope.method != "HEAD" and status not in _WITHOUT_BODY:
            LEDGERS.note_response(scope.client, len(body))
        if not request_body.is_left:
            protocol.response_bytes(status, sent, body)
            return
        if request_body.ends_connection:
            sent.append(("connection", "close"))
        protocol.response_bytes(status, sent, body)
        await request_body.discard()

    async def _run(self, request: Request) -> Response | None:
        gateway, route, principal = self.gateway, request.route, request.principal
        if route.is_probe:
            return await route.handler(request)
        gateway.acquire_request(principal)
        try:
            if route.access is not None and not principal.is_unrestricted:
                request.authorise(route.access(*request.params))
            gateway.require_serving()
            return await route.handler(request)
        finally:
            request.release_slot()

    def _check_origin(self, scope: Scope) -> None:
        """Raise Forbidden if, without keys, a foreign host or page asks for a WebSocket."""
        host = scope.headers.get("host") or require_host(scope.authority)
        if self._find_key("") is ANYONE:
            self._hosts.require_loopback(host)
            self._require_own_page(scope)

    def _require_own_page(self, scope: Scope) -> None:
        headers = scope.headers
        self._hosts.require_own_page(headers.get("origin") or "", headers.get("sec-fetch-site") or "")

    # -- keys -----------------------------------------------------------------------------------------

    def _without_header(self, route: Route, scope: Scope) -> Principal:
        """Return the principal of a request without a known key in its header. Raises Unauthorized.

        Streams accept the query parameter `token`, since browsers set no headers for them.
        """
        if route.is_probe and not self.gateway.settings.http.probe_auth:
            return KEYLESS
        if route.is_stream:
            for name, value in parse_qsl(scope.query_string, keep_blank_values=True):
                if name == "token":
                    found: Principal | None = self._find_key(f"Bearer {value}")
                    if found is not None:
                        return found
                    break
        raise key_needed()

    # -- answers --------------------------------------------------------------------------------------

    def _with_performance(self, body: dict[str, Any], begin_ns: int, status: int) -> bytes:
        if status < 400:
            total_ms = round((self.gateway.clock.monotonic_ns() - begin_ns) / 1e6, 3)
            body = {**body, "performance": {"server_total_ms": total_ms, **body.get("performance", {})}}
        return _encode(body)

    @staticmethod
    def _error_reply(error: RinglogError) -> Response:
        status, _ = status_and_code(error)
        return Response(status, error_body(error), error_headers(error))

    def _unexpected(self, error: Exception, route: str, request_id: str) -> Response:
        """Log an error that no handler expected, and answer with its reference."""
        reference = request_id or secrets.token_hex(8)
        where = "".join(traceback.format_exception(error)[-_TRACEBACK_LINES:])
        log_event(
            log, logging.ERROR, "unexpected error in a request", kind=route, error=repr(error), where=where,
            request_id=reference,
        )  # fmt: skip
        return self._error_reply(
            Internal("internal error of the gateway: see the engine log", reference=reference)
        )
