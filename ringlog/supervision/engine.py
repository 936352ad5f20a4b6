"""The supervisor's loop: one poll over all descriptors, then one short step for each event.

starting -> serving -> stopping -> stopped

starting   The shards start first. When each of them is ready or given up, gateway and schedulers start. When
           these are settled, engine.json is written and the background processes start.
serving    Dead children are restarted, stuck ones are killed and restarted, rings are created and removed.
stopping   See drain.py. A second signal, SECOND_SIGNAL_S (1 s) or more after the first, kills all children.

No record passes through this process. Only the poll waits. It ends at a death, a signal, a message, a
deadline or the tick.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial

import zmq

import ringlog
from ringlog import config as configuration
from ringlog import environment, hardening, logs, stop_points
from ringlog.board.board import ProcessField, ProcessSlot, ProcessState
from ringlog.board.processes import (
    GATEWAY,
    HTTP_GATEWAY,
    RECLAIMER,
    RELOCATOR,
    SCHEDULER,
    SUPERVISOR,
    SUPERVISOR_SLOT,
    WAL_SHARD,
    socket_of,
)
from ringlog.clock import Clock, SystemClock
from ringlog.config import Config
from ringlog.envelope.boot import ActorBoot
from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.refusal import error_reply
from ringlog.envelope.wire import PROTOCOL
from ringlog.errors import DiskError, NotReady, StartRefused
from ringlog.limits import HEARTBEAT_INTERVAL_MS, SECOND_SIGNAL_S
from ringlog.logs import log_event
from ringlog.signals import SignalInbox
from ringlog.storage.disk import Disk
from ringlog.storage.real_disk import RealDisk
from ringlog.supervision import run_dir
from ringlog.supervision.child_process import (
    SUPERVISOR_OOM_SCORE,
    api_keys_environment,
    child_environment,
    object_store_environment,
)
from ringlog.supervision.children import DOWN, GIVEN_UP, READY, ChildChange, Children, ChildState
from ringlog.supervision.control_handler import ControlHandler
from ringlog.supervision.drain import EngineDrain
from ringlog.supervision.endpoints import IPC, http_url, public_key_of
from ringlog.supervision.engine_resources import EngineResources
from ringlog.supervision.forkserver import ForkServer
from ringlog.supervision.restart import NS_PER_MS, NS_PER_S
from ringlog.supervision.rings import RingManager
from ringlog.supervision.sockets import ShardControlLink, SupervisorControlSocket
from ringlog.supervision.systemd_notifier import SystemdNotifier
from ringlog.supervision.topics import ConfiguredTopics
from ringlog.supervision.tree import (
    BACKGROUND,
    LOW_PRIORITY,
    ChildSpec,
    Tree,
    build_tree,
)

log: logging.Logger = logging.getLogger("ringlog.supervision")

TICK_MS = HEARTBEAT_INTERVAL_MS
STARTING_TICK_MS = 20
"""Tick (ms) while a child starts. A child becomes READY with a store on the board, which wakes no process."""
_LINGER_MS = 200
_FIRST_PID = 1
_PROGRESS_INTERVAL_NS = 2 * NS_PER_S
_ANNOUNCE_START_NS = NS_PER_S // 5
"""A start that takes longer (ns) writes starting.json, so that `ringlog status` can show its progress."""
EXIT_ORDERLY, EXIT_DEGRADED = 0, 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class EnginePhase(Enum):
    """Phase of the engine."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    STOPPED = "stopped"


def run_engine(
    config: Config,
    fork_server: ForkServer,
    *,
    environ: Mapping[str, str],
    on_ready: Callable[[EngineInfo], None] | None = None,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> int:
    """Run the engine in the main thread: start, serve until a stop is requested, stop.

    Children are forked from `fork_server`. `on_ready` is called once, when the engine is ready.

    Returns 0 after an orderly stop, 1 after a degraded one. Raises StartRefused if the engine must not start;
    then no process, lock or shared memory remains.
    """
    clock = clock or SystemClock()
    stop_points.configure(stop_points.plan_of_incarnation(environ.get(environment.STOP_POINTS, ""), 1))
    with contextlib.ExitStack() as undo:
        signals = SignalInbox(_SIGNALS)
        undo.callback(signals.close)
        tree = build_tree(config)
        resources = EngineResources(
            config, tree, disk=disk or RealDisk(), clock=clock, is_cancelled=signals.has_signals
        )
        undo.callback(resources.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(context.destroy, linger=_LINGER_MS)
        engine = Engine(
            config,
            tree,
            resources,
            context,
            signals,
            fork_server,
            environ=environ,
            clock=clock,
            on_ready=on_ready,
        )
        undo.callback(engine.close)
        return engine.run()


class Engine:
    """One start of an engine, with its resources."""

    def __init__(
        self,
        config: Config,
        tree: Tree,
        resources: EngineResources,
        context: zmq.Context[zmq.Socket[bytes]],
        signals: SignalInbox,
        fork_server: ForkServer,
        *,
        environ: Mapping[str, str],
        clock: Clock,
        on_ready: Callable[[EngineInfo], None] | None = None,
    ) -> None:
        """Create all parts. No process is started before `run`."""
        self.config = config
        self.phase: EnginePhase = EnginePhase.STARTING
        self._resources, self._context, self._signals, self._clock = resources, context, signals, clock
        self._on_ready = on_ready
        self._started_ns = clock.monotonic_ns()
        self._plain = configuration.to_plain(config)
        self._boot_id = hardening.boot_id()
        self._time_base_us = resources.time_base_us(self._boot_id, clock)
        self._notifier = SystemdNotifier(environ)
        self._slot = self._init_board_slot()
        self._rings = RingManager(
            resources.shm_dir,
            engine_id=resources.identity.engine_id,
            shards=config.wal.shards,
            settings=config.run,
            clock=clock,
        )
        self._topics = ConfiguredTopics(config.topics, config.wal.shards)
        self._children = Children(
            tree,
            board=resources.board,
            numbers=resources.identity,
            make_boot=self._make_boot,
            environ=child_environment(environ),
            liveness_fd=resources.liveness_fd,
            fork_server=fork_server,
            clock=clock,
            test_stop_points=environ.get(environment.STOP_POINTS, ""),
            environ_by_kind={
                **dict.fromkeys((RECLAIMER, RELOCATOR), object_store_environment(environ)),
                HTTP_GATEWAY: api_keys_environment(environ),
            },
        )
        self._control = SupervisorControlSocket(context, socket_of(resources.shm_dir, SUPERVISOR))
        self._failed_shard_sockets: dict[int, SupervisorControlSocket] = {}
        """Sockets at the addresses of shards that were given up. Requests there fail with `shard_failed`."""
        self._control_handler = ControlHandler(
            self.engine_info(),
            self._rings,
            self._children,
            slot=self._slot,
            state=self.state,
            stop=self.stop,
            clock=clock,
            config=config,
        )
        self._drain: EngineDrain | None = None
        self._force_from_ns = 0
        """Monotonic time (ns) from which a signal to stop counts as a second one."""
        self._failure = ""
        self._next_progress_ns = self._started_ns + _PROGRESS_INTERVAL_NS
        self._is_start_announced = False

    def run(self) -> int:
        """Run the loop until the engine has stopped; see run_engine."""
        hardening.set_oom_score(os.getpid(), SUPERVISOR_OOM_SCORE)
        log_event(
            log,
            logging.INFO,
            "engine starts",
            data_dir=self._resources.data_dir,
            shards=self.config.wal.shards,
            first_incarnation=self._resources.boot_incarnation,
            config=self._plain,
        )
        shards = self._children.of_kind(WAL_SHARD)
        self._children.fork_server.start(self._resources.data_dir, self._resources.liveness_fd)
        # The HTTP gateway serves health and readiness while the shards recover.
        for child in [*shards, *self._children.of_kind(HTTP_GATEWAY)]:
            self._children.request_start(child)
        while self.phase != EnginePhase.STOPPED:
            self._run_pass()
        if self._failure:
            raise StartRefused(self._failure)
        is_orderly = self._drain is not None and self._drain.is_orderly()
        log_event(log, logging.INFO, "engine stopped", orderly=is_orderly)
        return EXIT_ORDERLY if is_orderly else EXIT_DEGRADED

    def close(self) -> None:
        """Release everything. Children that are still alive after a failure of the supervisor are killed."""
        for child in self._children.states:
            self._children.kill(child, "supervisor failed")
            self._children.reap(child)
        self._children.fork_server.stop()
        if self.config.http.enabled and self.config.http.port_file:
            self._resources.remove_port_file(self.config.http.port_file, self._http_address())
        self._rings.close_all()
        self._control.close()
        for control_socket in self._failed_shard_sockets.values():
            control_socket.close()

    # -- start ----------------------------------------------------------------------------------------

    def _init_board_slot(self) -> ProcessSlot:
        slot = self._resources.board.process(SUPERVISOR_SLOT)
        slot.set(ProcessField.PID, os.getpid())
        slot.set(ProcessField.INCARNATION, self._resources.identity.allocate_incarnation())
        slot.set(ProcessField.STARTED_NS, self._started_ns)
        slot.set(ProcessField.STATE, ProcessState.STARTING)
        return slot

    def _make_boot(
        self, spec: ChildSpec, incarnation: int, test_stop_points: str, read_only_ms: int
    ) -> ActorBoot:
        resources = self._resources
        return ActorBoot(
            kind=spec.kind,
            name=spec.name,
            engine_id=resources.identity.engine_id,
            incarnation=incarnation,
            boot_incarnation=resources.boot_incarnation,
            boot_id=self._boot_id,
            time_base_us=self._time_base_us,
            slot=spec.slot,
            data_dir=resources.data_dir,
            shm_dir=resources.shm_dir,
            run_dir=resources.run_dir,
            gateway_socket=run_dir.gateway_socket(resources.run_dir, resources.shm_dir),
            supervisor_pid=os.getpid(),
            shard=spec.shard,
            shards=self.config.wal.shards,
            config=self._plain,
            is_background=spec.kind in LOW_PRIORITY,
            is_expendable=spec.kind in BACKGROUND,
            read_only_ms=read_only_ms,
            test_stop_points=test_stop_points,
        )

    def engine_info(self) -> EngineInfo:
        """Return the content of engine.json."""
        resources, native = self._resources, self.config.native
        is_tcp = self.config.gateway.enabled and native.endpoint != IPC
        gateway_ipc = run_dir.announced_gateway(resources.run_dir, resources.shm_dir)
        return EngineInfo(
            engine_id=resources.identity.engine_id,
            start_id=resources.start_id,
            shm_dir=resources.shm_dir,
            data_dir=resources.data_dir,
            shards=self.config.wal.shards,
            protocol=PROTOCOL,
            version=ringlog.__version__,
            supervisor_pid=os.getpid(),
            gateway_ipc=gateway_ipc if self.config.gateway.enabled else "",
            gateway_tcp=native.endpoint if is_tcp else "",
            public_key=public_key_of(native.curve_key_file) if is_tcp else "",
            cold_dir=self.config.cold.dir,
            schedulers=self.config.delivery.schedulers,
            http_url=http_url(self.config.http) if self.config.http.enabled else "",
            restore_id=resources.identity.restore_id,
        )

    # -- one pass of the loop -------------------------------------------------------------------------

    def _run_pass(self) -> None:
        readable = self._wait()
        changes: list[ChildChange] = []
        # Deaths first: a pid in a new message may be a dead client's pid that the kernel has reused.
        for fd, child in self._children.pidfds().items():
            if fd in readable:
                changes += self._children.reap(child)
        for fd, pid in self._rings.pidfds().items():
            if fd in readable:
                self._rings.client_died(pid)
        for number in self._signals.take_signals():
            self._handle_signal(number)
        self._apply(changes)
        self._apply(self._children.poll())
        if os.getpid() == _FIRST_PID:
            self._children.reap_orphans()
        for shard, link in self._rings.links().items():
            self._handle_replies(shard, link)
        for address, envelope in self._control.receive():
            answer = partial(self._control.send, address, envelope.corr)
            self._control_handler.handle_request(envelope.message, answer)
        for shard, control_socket in self._failed_shard_sockets.items():
            for address, envelope in control_socket.receive():
                failed = NotReady("the shard failed", reason="shard_failed", shard=shard)
                control_socket.send(address, envelope.corr, error_reply(failed))
        self._rings.poll_producer_locks()
        now_ns = self._clock.monotonic_ns()
        for control_socket in (self._control, *self._failed_shard_sockets.values()):
            control_socket.guard(now_ns)
        self._slot.add(ProcessField.TURNS, 1)
        self._slot.set(ProcessField.HEARTBEAT_NS, now_ns)
        self._advance()

    def _wait(self) -> set[int]:
        """Poll all descriptors and return the readable ones. The caller reads sockets in any case."""
        poller = zmq.Poller()
        poller.register(self._signals.fileno(), zmq.POLLIN)
        for control_socket in (self._control, *self._failed_shard_sockets.values()):
            poller.register(control_socket.socket, zmq.POLLIN)
        for link in self._rings.links().values():
            poller.register(link.socket, zmq.POLLIN)
        for fd in (*self._children.pidfds(), *self._rings.pidfds(), self._children.fork_server.fileno()):
            if fd >= 0:
                poller.register(fd, zmq.POLLIN)
        return {ready for ready, _ in poller.poll(self._timeout_ms()) if isinstance(ready, int)}

    def _timeout_ms(self) -> int:
        tick = STARTING_TICK_MS if self._children.is_any_starting() else TICK_MS
        deadline = self._children.next_deadline_ns()
        if deadline is None:
            return tick
        left_ns = deadline - self._clock.monotonic_ns()
        return min(tick, max(0, -(-left_ns // NS_PER_MS)))

    def _handle_replies(self, shard: int, link: ShardControlLink) -> None:
        for envelope in link.receive():
            self._rings.handle_reply(shard, envelope.corr, envelope.message)
            self._topics.handle_reply(shard, envelope.corr, envelope.message, self._rings.links())

    def _apply(self, changes: list[ChildChange]) -> None:
        for event, child in changes:
            if child.spec.kind == WAL_SHARD:
                self._shard_changed(event, child)

    def _shard_changed(self, event: str, child: ChildState) -> None:
        shard = child.spec.shard
        if event == READY:
            link = ShardControlLink(self._context, socket_of(self._resources.shm_dir, child.spec.name))
            self._rings.shard_ready(shard, link)
            self._topics.shard_ready(shard, link)
        elif event == DOWN:
            self._rings.shard_down(shard)
        elif event == GIVEN_UP:
            self._rings.shard_failed(shard, child.give_up_reason)
            self._failed_shard_sockets[shard] = SupervisorControlSocket(
                self._context, socket_of(self._resources.shm_dir, child.spec.name)
            )

    # -- phases ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.phase == EnginePhase.STARTING:
            self._advance_start()
        elif self.phase == EnginePhase.SERVING:
            self._ping_watchdog()
        elif self._drain is not None and self._drain.advance():
            self.phase = EnginePhase.STOPPED

    def _advance_start(self) -> None:
        shards = self._children.of_kind(WAL_SHARD)
        if not all(child.is_settled for child in shards):
            self._report_recovery(shards)
            return
        if not any(child.is_ready for child in shards):
            self._failure = f"no shard could start: {shards[0].give_up_reason}"
            self.stop(self._failure)
            return
        others = [*self._children.of_kind(GATEWAY), *self._children.of_kind(SCHEDULER)]
        for child in others:
            if not child.starts and child.start_at_ns is None:
                self._children.request_start(child)
        if all(child.is_settled for child in [*others, *self._children.of_kind(HTTP_GATEWAY)]):
            self._become_ready()

    def _become_ready(self) -> None:
        info = self.engine_info()
        # First: who reads the announcement sends requests at once, and the HTTP gateway asks the board.
        self._slot.set(ProcessField.STATE, ProcessState.READY)
        try:
            self._resources.announce(info)
            if self.config.http.enabled and self.config.http.port_file:
                self._resources.write_port_file(self.config.http.port_file, self._http_address())
        except DiskError as e:
            self._failure = f"engine.json or http.port_file cannot be written: {e}"
            self.stop(self._failure)
            return
        self.phase = EnginePhase.SERVING
        self._notifier.notify_ready()
        took_ms = (self._clock.monotonic_ns() - self._started_ns) // NS_PER_MS
        log_event(log, logging.INFO, "engine ready", after_ms=took_ms, shm_dir=info.shm_dir)
        for child in self._children.states:
            if child.spec.kind in BACKGROUND:
                self._children.request_start(child)
        if self._on_ready is not None:
            self._on_ready(info)

    def _http_address(self) -> str:
        """Return `host:port` of the HTTP gateway, for clients on this host."""
        return http_url(self.config.http).partition("//")[2]

    def _report_recovery(self, shards: list[ChildState]) -> None:
        """Log the progress of a long recovery from time to time, and announce where to query it."""
        now = self._clock.monotonic_ns()
        if not self._is_start_announced and now >= self._started_ns + _ANNOUNCE_START_NS:
            self._is_start_announced = True
            with contextlib.suppress(DiskError):
                self._resources.write_starting_json(self.engine_info())
        if now < self._next_progress_ns:
            return
        self._next_progress_ns = now + _PROGRESS_INTERVAL_NS
        progress = {w.spec.name: w.slot.get(ProcessField.PROGRESS) / 10 for w in shards if not w.is_settled}
        self._notifier.notify_status(
            "recovering " + ", ".join(f"{name} {done:.1f} %" for name, done in progress.items())
        )
        log_event(log, logging.INFO, "recovering", percent=progress)

    def _ping_watchdog(self) -> None:
        if all(child.is_ready for child in self._children.of_kind(WAL_SHARD)):
            self._notifier.ping_watchdog()

    def state(self) -> str:
        """Return starting, ready, degraded (a child that should serve does not) or draining."""
        if self.phase == EnginePhase.SERVING:
            return "ready" if all(map(_is_healthy, self._children.states)) else "degraded"
        return "starting" if self.phase == EnginePhase.STARTING else "draining"

    # -- stop -----------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Begin the orderly stop. Further calls have no effect."""
        if self._drain is not None:
            return
        log_event(log, logging.INFO, "engine stops", reason=reason)
        self.phase = EnginePhase.STOPPING
        self._slot.set(ProcessField.STATE, ProcessState.DRAINING)
        self._notifier.notify_stopping()
        self._force_from_ns = self._clock.monotonic_ns() + round(SECOND_SIGNAL_S * NS_PER_S)
        self._drain = EngineDrain(self._children, drain_s=self.config.supervisor.drain_s, clock=self._clock)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number in {signal.SIGTERM, signal.SIGINT}:
            if self._drain is None:
                self.stop(number.name)
            elif self._clock.monotonic_ns() >= self._force_from_ns:
                self._drain.force()
        elif number == signal.SIGHUP:
            logs.reopen()
            self._children.signal_ready_children(signal.SIGHUP)
        elif number == signal.SIGQUIT:
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            self._children.signal_ready_children(signal.SIGQUIT)


def _is_healthy(child: ChildState) -> bool:
    """Return whether the child serves, or is a background process that was not given up.

    No client waits for a background process during a restart.
    """
    return child.is_ready or (child.spec.kind in BACKGROUND and not child.give_up_reason)
