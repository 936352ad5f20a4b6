"""An engine under attack, a canary client that must not notice the attack, and a census of used resources.

The engine is the program that users run: two shards, the background processes, and a gateway on the local
socket and on TCP with CURVE and a list of keys. The canary client has its own key. Before and after each row
it appends and reads over TCP. At the end, every record that was acknowledged to it is read again.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import zmq

import ringlog
from chaos.rigs.bench import log_tail
from ringlog.cli.maintenance import COMPACTOR, RECLAIMER, request_actor
from ringlog.client import Client
from ringlog.drill.checks import GuaranteeBroken
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL, EnvelopeInvalid, decode, encode
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.frame import encode_records, frame
from ringlog.link.curve import CurveKey, key_file_text, new_key
from ringlog.testing.real_engine import TestEngine, engine, wait_until

ANSWER_S = 5.0
"""Time limit (s) for a required answer."""
SLOWER_MAX = 4.0
"""Limit for the duration under attack, as a multiple of the duration without attack in the same run."""
QUIET_S = 0.25
"""Time (s) to wait for an answer that must not come."""
CALM_S = 15.0
"""Time (s) within which the engine must release the resources that an attack occupied."""
RSS_GROWTH_BYTES_MAX = 200 << 20
"""Allowed memory growth of a process over a row: free lists and libzmq's queues, not data of the attack."""
FDS_GROWTH_MAX = 32
"""Allowed growth of descriptors: files, and sockets of background processes, that the engine opens late."""
CANARY = "canary.log"
MARKER = b"S3CRET-payload-marker"
BACKGROUND = ("wal_shard", "scheduler", "gateway", "compactor", "reclaimer", "relocator")
SCOPES = ("read", "write", "delete", "admin")


@dataclass(frozen=True, slots=True)
class Census:
    """Pid, number of descriptors, and resident memory (bytes) of each process of the engine."""

    pids: Mapping[str, int]
    descriptors: Mapping[str, int]
    resident: Mapping[str, int]


@dataclass(slots=True)
class Arena:
    """A running engine, and access to it."""

    running: TestEngine
    root: Path
    server: CurveKey
    owner: CurveKey
    """Key of the canary, with all scopes for all names."""
    limited: CurveKey
    """Key with scopes `read` and `write` and prefix `mine.`."""
    by_scope: Mapping[str, CurveKey]
    """One key for each scope, with this scope only and prefix `mine.`."""
    context: zmq.Context[Any] = field(default_factory=zmq.Context)
    canary: Client | None = None
    promised: list[int] = field(default_factory=list)
    """Values whose appends were acknowledged to the canary, in order."""
    growth_max: int = RSS_GROWTH_BYTES_MAX
    """Allowed memory growth (bytes). A row raises it if the engine must keep much of its data."""

    # -- the canary ---------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """TCP port of the gateway."""
        return int(self.running.info.gateway_tcp.rsplit(":", 1)[1])

    @property
    def endpoint(self) -> str:
        """TCP endpoint of the gateway."""
        return f"tcp://127.0.0.1:{self.port}"

    def url(self, port: int = 0) -> str:
        """Return the URL for a client. Pass `port` to connect through a proxy."""
        key = quote(self.server.public.decode(), safe="")
        return f"ringlog://127.0.0.1:{port or self.port}?server_key={key}"

    def connect(self, key: CurveKey | None = None, port: int = 0, **options: Any) -> Client:
        """Connect a client with `key` (default: the canary's key)."""
        return ringlog.connect(
            self.url(port), key=(key or self.owner).secret.decode(), wait=ANSWER_S * 2, **options
        )

    def check_canary(self) -> None:
        """Let the canary append and read one record.

        Raises GuaranteeBroken if the canary is not served, reads a wrong record, or waits longer than
        ANSWER_S.
        """
        if self.canary is None:
            self.canary = self.connect()
        value = len(self.promised)
        begun = time.monotonic()
        try:
            self.canary.append(CANARY, self._record(value))
            self.promised.append(value)
            page = self.canary.read(CANARY, len(self.promised) - 1, limit=10)
        except RinglogError as e:
            raise GuaranteeBroken(f"canary request failed: {type(e).__name__}: {e}") from e
        found = [data_of(record) for record in page]
        if found != [self._record(value)]:
            raise GuaranteeBroken(f"canary appended record {value} and read {found!r}")
        took_s = time.monotonic() - begun
        if took_s > ANSWER_S:
            raise GuaranteeBroken(f"canary append and read took {took_s:.1f} s, limit {ANSWER_S:.0f} s")

    def check_acknowledged(self) -> int:
        """Check that every acknowledged canary record can be read once and in order; return their number.

        Raises GuaranteeBroken if the records differ.
        """
        with self.connect() as client:
            found = [data_of(record) for record in client.reader(CANARY)]
        if found != [self._record(value) for value in self.promised]:
            raise GuaranteeBroken(
                f"canary records differ: {len(self.promised)} acknowledged, {len(found)} read"
            )
        return len(found)

    @staticmethod
    def _record(value: int) -> bytes:
        return MARKER + b" %d" % value

    # -- other peers --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def peer(
        self, endpoint: str = "", key: CurveKey | None = None, server: bytes = b"", **options: Any
    ) -> Iterator[zmq.Socket[Any]]:
        """Yield a raw DEALER socket that can send any bytes. Without `key` it uses no security mechanism."""
        dealer = self.context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            for name, value in options.items():
                dealer.setsockopt(getattr(zmq, name), value)
            if key is not None:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, server or self.server.public)
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
                dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            dealer.connect(endpoint or self.endpoint)
            yield dealer
        finally:
            dealer.close(0)

    def sockets(self) -> list[str]:
        """Return the endpoints of all local sockets of the engine."""
        return [f"ipc://{path}" for path in sorted(Path(self.running.info.shm_dir).glob("*.sock"))]

    def raw(self, endpoint: str = "") -> socket.socket:
        """Open a plain stream socket, without ZeroMQ."""
        endpoint = endpoint or self.endpoint
        if endpoint.startswith("ipc://"):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(ANSWER_S)
            made.connect(endpoint.removeprefix("ipc://"))
            return made
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S)

    # -- census ------------------------------------------------------------------------------------

    def census(self) -> Census:
        """Return the present census."""
        found = {process.name: process.pid for process in self.running.status().processes}
        found["supervisor"] = self.running.pid
        return Census(
            found,
            {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in found.items()},
            {name: psutil.Process(pid).memory_info().rss for name, pid in found.items()},
        )

    def settle_and_census(self) -> Census:
        """Make every process do its lazy initialization, then return the census."""
        for kind in BACKGROUND:
            self.running.wait_ready(kind)
        self.passes()
        self.check_canary()
        return self.census()

    def passes(self) -> dict[str, float]:
        """Run a checkpoint and a scrub; return the duration (s) of each by the name of the request."""
        shm_dir = self.running.info.shm_dir
        took = {}
        for actor, request, wanted in (
            (COMPACTOR, m.CheckpointNow(), m.CheckpointMade), (RECLAIMER, m.ScrubNow(), m.ScrubReport),
        ):  # fmt: skip
            begun = time.monotonic()
            request_actor(shm_dir, actor, request, wanted)
            took[type(request).__name__] = time.monotonic() - begun
        return took

    def cpu_s(self, kind: str) -> float:
        """Return the CPU time (s) of all processes of one kind. Other load on the host is not included."""
        times = [
            psutil.Process(p).cpu_times() for name, p in self.census().pids.items() if name.startswith(kind)
        ]
        return float(sum(each.user + each.system for each in times))

    def judge(self, before: Census) -> None:
        """Check after a row that the canary is served, no process restarted, and resources are released.

        Raises GuaranteeBroken after CALM_S.
        """
        self.check_canary()
        wrong = ""

        def is_calm() -> bool:
            nonlocal wrong
            try:
                wrong = difference(before, self.census(), self.growth_max)
            except (OSError, psutil.Error) as e:
                wrong = f"a process ended: {e}"
            return not wrong

        try:
            wait_until(is_calm, CALM_S, "the engine to release the resources of the attack")
        except RinglogError:
            raise GuaranteeBroken(f"{wrong}\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        """Return the end of the engine's log."""
        return log_tail(self.running.log_path)


def facts_of(place: Arena) -> dict[str, Any]:
    """Return the facts about topics, groups and routers that clients see, without background progress."""
    with place.connect() as client:
        topics = list(client.topics.list())
        found: dict[str, Any] = {
            each.topic: (each.epoch, each.type, each.head_seq, each.count, each.config) for each in topics
        }
        for each in topics:
            for group in client.topics.groups(each.topic):
                found[f"{each.topic} {group.group}"] = (group.mode, group.floor)
        for router in client.routers.list():
            found[f"router {router.router}"] = (router.source, router.dest, router.filter)
    return found


def check_recovery(place: Arena) -> None:
    """Kill all processes twice, the second time after a checkpoint, and compare the facts.

    Raises GuaranteeBroken if a fact differs after a recovery.
    """
    before: dict[str, Any] = {}
    # A peer that may open a shard's socket can take a router from its scheduler. A new scheduler claims it
    # again.
    place.running.kill("scheduler")
    place.running.wait_ready("scheduler")

    def are_settled() -> bool:
        nonlocal before
        last, before = before, facts_of(place)
        return last == before

    wait_until(are_settled, CALM_S, "routers and dead letters to settle")
    for how in ("log", "snapshot"):
        if how == "snapshot":
            place.passes()
        place.running.crash()
        place.running.start()
        for kind in BACKGROUND:
            place.running.wait_ready(kind)
        after = facts_of(place)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            first = changed[0]
            raise GuaranteeBroken(
                f"{len(changed)} facts differ after a recovery from the {how}, first {first}: "
                f"{before.get(first)} became {after.get(first)}"
            )
    place.check_canary()


def difference(before: Census, after: Census, growth_max: int = RSS_GROWTH_BYTES_MAX) -> str:
    """Describe the first difference between two counts; return an empty string if there is none."""
    if before.pids != after.pids:
        died = sorted(name for name, pid in before.pids.items() if after.pids.get(name) != pid)
        return f"died: {', '.join(died)}"
    for name in before.pids:
        more = after.descriptors[name] - before.descriptors[name]
        if more > FDS_GROWTH_MAX:
            return f"{name} has {more} descriptors more than before, limit {FDS_GROWTH_MAX}"
        grown = after.resident[name] - before.resident[name]
        if grown > growth_max:
            return f"{name} grew by {grown >> 20} MiB, limit {growth_max >> 20} MiB"
    return ""


# -- starting ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def arena(root: Path, environ: Mapping[str, str] | None = None, **config: Any) -> Iterator[Arena]:
    """Start an engine with keys and a canary below `root`."""
    server, owner, limited = new_key(), new_key(), new_key()
    by_scope = {scope: new_key() for scope in SCOPES}
    root.mkdir(parents=True, exist_ok=True)
    keys = (
        f'[[keys]]\nname = "owner-key"\npublic_key = "{owner.public.decode()}"\n'
        f'[[keys]]\nname = "limited"\npublic_key = "{limited.public.decode()}"\n'
        'scopes = ["read", "write"]\nprefixes = ["mine."]\n'
    ) + "".join(
        f'[[keys]]\nname = "only-{scope}"\npublic_key = "{key.public.decode()}"\n'
        f'scopes = ["{scope}"]\nprefixes = ["mine."]\n'
        for scope, key in by_scope.items()
    )
    settings = {
        "wal": {"shards": 2},
        # The engine keeps rings of an attack for 30 s. Small rings do not look like a leak.
        "run": {"ring_bytes": 1 << 20},
        "gateway": {"enabled": True},
        "storage": {"enabled": True},
        "delivery": {"schedulers": 1},
        "native": {
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "curve_key_file": private_file(root / "server.key", key_file_text(server)),
        },
        "auth": {"keys_file": private_file(root / "keys.toml", keys)},
        "cold": {"dir": str(root / "cold")},
        **config,
    }
    (root / "cold").mkdir(mode=0o700, exist_ok=True)
    with engine(directory=root / "engine", environ=environ, **settings) as running:
        made = Arena(running, root / "engine", server, owner, limited, by_scope)
        try:
            with made.connect() as client:
                client.topics.create(CANARY, durability="fsync")
                client.topics.create("mine.log")
            made.check_canary()
            yield made
        finally:
            if made.canary is not None:
                made.canary.close(2.0)
            made.context.destroy(0)


def free_port() -> int:
    """Return a TCP port that was free at the time of the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def private_file(path: Path, text: str) -> str:
    """Write a file of mode 0600 with this text; return its path."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    return str(path)


# -- messages ---------------------------------------------------------------------------------------------


def ask(peer: zmq.Socket[Any], parts: list[Any], seconds: float = ANSWER_S) -> m.Message | None:
    """Send message parts; return the next answer, or None after `seconds`."""
    peer.send_multipart(parts)
    return hear(peer, seconds)


def hear(peer: zmq.Socket[Any], seconds: float = ANSWER_S) -> m.Message | None:
    """Return the next answer, or None after `seconds`.

    Raises GuaranteeBroken if the answer is not an envelope.
    """
    if not peer.poll(round(seconds * 1000)):
        return None
    try:
        return decode(peer.recv_multipart()[0]).message
    except EnvelopeInvalid as e:
        raise GuaranteeBroken(f"an answer is not a valid envelope: {e}") from e


def hello(peer: zmq.Socket[Any], seconds: float = ANSWER_S) -> bool:
    """Return whether the engine answers the peer's Hello with Welcome."""
    return isinstance(ask(peer, [encode(m.Hello(PROTOCOL, "chaos"), 1)], seconds), m.Welcome)


def a_frame(*payloads: bytes, topic_id: int = 0, **options: Any) -> bytes:
    """Return a frame of these records, encoded as a producer encodes it."""
    given = {"epoch": 0, "producer_id": 7, "producer_seq": 1, **options}
    return bytes(frame(encode_records(list(payloads)), topic_id=topic_id, **given))


def a_producer(dice: random.Random) -> int:
    """Return a new producer id, so that frames do not repeat those of an earlier round."""
    return dice.getrandbits(48) | 1 << 48


def head_of(client: Client, topic: str) -> int:
    """Return the last seq of a topic, or 0 if the topic does not exist."""
    try:
        return client.topics.state(topic).head_seq
    except TopicNotFound:
        return 0


def data_of(record: Any) -> bytes:
    """Return a record's payload. Tombstones are not supported."""
    return bytes(record.data)
