"""The process of the HTTP gateway: its event loop, the HTTP server in it, heartbeat and orderly stop.

The server (granian) reads and writes HTTP in a thread of its own and calls the application in the loop. It
sets SO_REUSEPORT: the kernel distributes connections among all gateways of the engine, see keep_http_port. At
a stop, new requests are refused, streams get their final frame, requests in progress are answered within a
share of the drain time, and then the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from ringlog.access.keys import Principal
from ringlog.actors.http_gateway.api.route_table import RouteTable
from ringlog.actors.http_gateway.application import Application
from ringlog.actors.http_gateway.gateway import Gateway
from ringlog.actors.http_gateway.leases.settled_notices import SettledNotices
from ringlog.actors.http_gateway.leases.workers import Workers
from ringlog.actors.http_gateway.records.writes import WriteLanes
from ringlog.actors.http_gateway.routes import ROUTES
from ringlog.actors.http_gateway.siblings import Siblings
from ringlog.actors.http_gateway.streams.session_moves import SessionMoves
from ringlog.actors.http_gateway.streams.watches import WatchSessions
from ringlog.aio import connect
from ringlog.board.board import Board
from ringlog.board.heartbeat import Heartbeat
from ringlog.clock import SystemClock
from ringlog.config import Config
from ringlog.envelope import messages as m
from ringlog.envelope.boot import ActorBoot
from ringlog.environment import API_KEYS
from ringlog.errors import ConfigError, ExitCode, InvalidRequest
from ringlog.limits import (
    GATEWAY_DRAIN_SHARE,
    HEARTBEAT_INTERVAL_MS,
    HTTP_BACKLOG,
    HTTP_HEADER_BYTES_MAX,
    HTTP_HEADER_MS_MAX,
    HTTP_REQUEST_MS_MAX,
)
from ringlog.link.keys_file import follow_keys
from ringlog.link.peer_request import PeerReply
from ringlog.logs import log_event
from ringlog.signals import StopFlag

log: logging.Logger = logging.getLogger("ringlog.http_gateway")

_POLL_S = 0.05
_BEAT_S = HEARTBEAT_INTERVAL_MS / 4_000


class HttpGatewayShell:
    """One incarnation of the HTTP gateway. Implements runtime.duty_cycle.Actor around an event loop."""

    def __init__(self, boot: ActorBoot, settings: Config) -> None:
        self._boot, self._settings = boot, settings
        self._clock = SystemClock()
        self.exit_code: ExitCode | None = None
        self._loop = _new_loop()
        asyncio.set_event_loop(self._loop)
        board = Board.open(boot.shm_dir, writable=True)
        slot = board.process(boot.slot)
        self._heartbeat = Heartbeat(slot)
        client = connect(
            f"ringlog://{boot.run_dir}", client_id=boot.name, timeout_ms=HTTP_REQUEST_MS_MAX, transport="ring"
        )
        number = int(boot.name.rpartition("-")[2])
        siblings = Siblings(number, settings.http.processes, boot.shm_dir, board, client)
        self.gateway: Gateway = Gateway(settings, client, board, slot, siblings, boot.shm_dir)
        self._keys = follow_keys(settings.auth.keys_file, os.environ.get(API_KEYS, ""))
        self.gateway.keys = self._keys.keys.bearer
        self.gateway.lanes = WriteLanes(self.gateway)
        self.gateway.watches = WatchSessions(self.gateway)
        self.gateway.moves = SessionMoves(self.gateway, self.gateway.watches, siblings)
        self.gateway.workers = Workers(slot, SettledNotices(siblings) if siblings.pages else None)
        self.application: Application = Application(self.gateway, RouteTable(ROUTES), self._find_key)
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._stop: StopFlag | None = None

    def _find_key(self, authorization: str) -> Principal | None:
        return self.gateway.keys.find(authorization)

    # -- lifecycle: runtime.duty_cycle.Actor ----------------------------------------------------------

    def on_start(self, stop: StopFlag) -> None:
        """Listen, and log that the gateway is ready."""
        self._stop = stop
        stop.call_on_hangup(self._keys.reload)
        http = self._settings.http
        self._loop.run_until_complete(self._join_siblings())
        self._server = _new_server(self.application, self._settings)
        self._loop.call_soon(self._beat)
        self._loop.add_reader(stop.fileno(), self._on_signal)
        self._serving = self._loop.create_task(self._server.serve())
        self._loop.run_until_complete(self._listening())
        address = f"[{http.host}]:{http.port}" if ":" in http.host else f"{http.host}:{http.port}"
        scheme = "https" if http.tls_cert_file else "http"
        log_event(log, logging.INFO, "ready", endpoint=f"{scheme}://{address}")

    async def _join_siblings(self) -> None:
        """Learn where sessions of a predecessor are, then serve the other gateways."""
        gateway = self.gateway
        await gateway.moves.recover()
        gateway.siblings.serve(self._answer)
        gateway.moves.keep_renewing()

    async def _answer(self, request: m.Message) -> PeerReply:
        """Answer a request of another gateway. Raises InvalidRequest."""
        match request:
            case m.FindSession() | m.ListSessions():
                return await self.gateway.moves.answer(request)
            case m.SessionsHeld(holder, sessions):
                self.gateway.moves.note_held(holder, sessions)
            case m.JobsSettled(jobs):
                for each in jobs:
                    self.gateway.workers.note_settled(each.topic, each.node, each.seqs, each.returned)
            case m.Ping():
                return PeerReply(m.Pong(self._boot.incarnation, self._heartbeat.passes))
            case _:
                kind = type(request).__name__
                raise InvalidRequest("the http_gateway does not handle this kind of request", kind=kind)
        return PeerReply(m.Noted())

    async def _listening(self) -> None:
        """Wait until the server has its socket. Raises ConfigError if it cannot listen."""
        assert self._serving is not None
        while not self._server.wrks:
            if self._serving.done():
                error = self._serving.exception()
                raise ConfigError(
                    "the HTTP gateway cannot listen: is the port in use?", host=self._settings.http.host,
                    port=self._settings.http.port, reason=str(error),
                )  # fmt: skip
            await asyncio.sleep(0)

    def do_work(self) -> int:
        """Nothing: the loop does all work, see `idle`."""
        return 0

    def idle(self, work: int) -> None:
        """Run the event loop until the process is to stop, or has drained."""
        self._loop.run_forever()

    def drain(self) -> bool:
        """Refuse new requests, end streams, finish what is in progress, then end."""
        self.gateway.is_draining = True
        self._loop.create_task(self._drain())
        return True

    async def _drain(self) -> None:
        gateway = self.gateway
        deadline = self._loop.time() + self._settings.supervisor.drain_s * GATEWAY_DRAIN_SHARE
        for stream in tuple(gateway.streams):
            stream.cancel()
        gateway.end_discards()
        while (gateway.streams or gateway.requests_in_flight) and self._loop.time() < deadline:
            await asyncio.sleep(_POLL_S)
        if gateway.requests_in_flight:
            log_event(
                log, logging.WARNING, "drain timed out, requests dropped", held=gateway.requests_in_flight
            )
        self._server.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(deadline - self._loop.time(), _POLL_S)):
                await asyncio.shield(self._serving)  # type: ignore[arg-type]
        self.exit_code = ExitCode.OK
        self._loop.stop()

    def on_close(self) -> None:
        """Answer other gateways no more, and close the client."""
        self.gateway.moves.close()
        self.gateway.siblings.close()
        self._loop.run_until_complete(self.gateway.client.close(0.0))

    # -- while the loop runs --------------------------------------------------------------------------

    def _beat(self) -> None:
        now_ns = self._clock.monotonic_ns()
        self._heartbeat.beat(now_ns)
        self.gateway.siblings.guard(now_ns)
        self.gateway.end_late_bodies(now_ns)
        if (keys := self._keys.poll(now_ns)) is not None:
            self.gateway.change_keys(keys.bearer)
        self._loop.call_later(_BEAT_S, self._beat)
        self._on_signal()
        if self._serving is not None and self._serving.done() and not self.gateway.is_draining:
            self._serving.result()
            raise RuntimeError("the HTTP server has ended")

    def _on_signal(self) -> None:
        """Leave the loop if the process is to stop: the duty cycle then calls `drain`."""
        if self._stop is not None and self._stop.is_set() and not self.gateway.is_draining:
            self._loop.stop()


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _new_server(application: Application, settings: Config) -> Any:
    """Create the HTTP server. Raises ConfigError if it is not installed."""
    try:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings, HTTP2Settings
        from granian.server.embed import Server
    except ImportError:
        raise ConfigError(
            "http.enabled needs the HTTP server: install it with pip install 'ringlog[http]'"
        ) from None
    http = settings.http
    return Server(
        application, address=http.host, port=http.port, interface=Interfaces.RSGI, http=HTTPModes.auto,
        backlog=HTTP_BACKLOG, backpressure=http.max_connections,
        http1_settings=HTTP1Settings(
            header_read_timeout=HTTP_HEADER_MS_MAX, max_buffer_size=HTTP_HEADER_BYTES_MAX
        ),
        http2_settings=HTTP2Settings(max_headers_size=HTTP_HEADER_BYTES_MAX),
        log_enabled=False,
        ssl_cert=Path(http.tls_cert_file) if http.tls_cert_file else None,
        ssl_key=Path(http.tls_key_file) if http.tls_key_file else None,
    )  # fmt: skip
