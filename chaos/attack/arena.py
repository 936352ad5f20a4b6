"""An engine under attack, a client that must notice nothing of it, and a count of everything it holds.

The engine is the program users run: two shards, the background processes, a gateway on the local socket
and on TCP with CURVE and a list of keys. The canary has a key of its own; before and after each row it
appends and reads over TCP, and everything it was ever promised is read again at the end.
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
from chaos.order import Broken
from ringlog.cli.maintenance import COMPACTOR, RECLAIMER, request_actor
from ringlog.client import Client
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL, EnvelopeInvalid, decode, encode
from ringlog.errors import RinglogError, TopicNotFound
from ringlog.frame import encode_records, frame
from ringlog.link.curve import CurveKey, key_file_text, new_key
from ringlog.testing.real_engine import TestEngine, engine, wait_until

ANSWER_S = 5.0
"""How long an answer that must come is waited for."""
SLOWER_MAX = 4.0
"""How many times as long a thing may take under attack as it took in the same run without one."""
QUIET_S = 0.25
"""How long a peer that must get no answer is listened to."""
CALM_S = 15.0
"""How long an engine may take to give back what an attack made it take up."""
RSS_GROWTH_BYTES_MAX = 200 << 20
"""What a process may hold more than before a row: free lists and libzmq's queues, not the attack itself."""
FDS_GROWTH_MAX = 32
"""What the engine itself opens late: files, and sockets from its background processes to the shards."""
CANARY = "canary.log"
MARKER = b"S3CRET-payload-marker"
BACKGROUND = ("wal_shard", "scheduler", "gateway", "compactor", "reclaimer", "relocator")
SCOPES = ("read", "write", "delete", "admin")


@dataclass(frozen=True, slots=True)
class Census:
    """What each process of the engine holds."""

    pids: Mapping[str, int]
    descriptors: Mapping[str, int]
    resident: Mapping[str, int]


@dataclass(slots=True)
class Arena:
    """A running engine and the means to talk to it."""

    running: TestEngine
    root: Path
    server: CurveKey
    owner: CurveKey
    """A key with all scopes and all names: the canary's."""
    limited: CurveKey
    """Scopes `read` and `write`, prefix `mine.`."""
    by_scope: Mapping[str, CurveKey]
    """A key for each scope alone, prefix `mine.`."""
    context: zmq.Context[Any] = field(default_factory=zmq.Context)
    canary: Client | None = None
    promised: list[int] = field(default_factory=list)
    """Values the canary was told are stored, in their order."""
    growth_max: int = RSS_GROWTH_BYTES_MAX
    """More where a row leaves much behind that is still there, and is looked up."""

    # -- the canary ---------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """Of the gateway on TCP."""
        return int(self.running.info.gateway_tcp.rsplit(":", 1)[1])

    @property
    def endpoint(self) -> str:
        """The gateway on TCP."""
        return f"tcp://127.0.0.1:{self.port}"

    def url(self, port: int = 0) -> str:
        """What a client is given; another `port` leads through a proxy."""
        key = quote(self.server.public.decode(), safe="")
        return f"ringlog://127.0.0.1:{port or self.port}?server_key={key}"

    def connect(self, key: CurveKey | None = None, port: int = 0, **options: Any) -> Client:
        """A client with its own key."""
        return ringlog.connect(
            self.url(port), key=(key or self.owner).secret.decode(), wait=ANSWER_S * 2, **options
        )

    def use(self) -> None:
        """The canary appends and reads; raises Broken when it is not served, or served wrongly."""
        if self.canary is None:
            self.canary = self.connect()
        value = len(self.promised)
        begun = time.monotonic()
        try:
            self.canary.append(CANARY, self._record(value))
            self.promised.append(value)
            page = self.canary.read(CANARY, len(self.promised) - 1, limit=10)
        except RinglogError as e:
            raise Broken(f"the canary is not served: {type(e).__name__}: {e}") from e
        found = [data_of(record) for record in page]
        if found != [self._record(value)]:
            raise Broken(f"the canary wrote {value} and read {found!r}")
        if time.monotonic() - begun > ANSWER_S:
            raise Broken(f"the canary waited {time.monotonic() - begun:.1f} s")

    def audit(self) -> int:
        """Everything the canary was promised is there, once and in order; returns how many."""
        with self.connect() as client:
            found = [data_of(record) for record in client.reader(CANARY)]
        if found != [self._record(value) for value in self.promised]:
            raise Broken(f"{len(self.promised)} records were promised, {len(found)} are there or differ")
        return len(found)

    @staticmethod
    def _record(value: int) -> bytes:
        return MARKER + b" %d" % value

    # -- other peers --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def peer(
        self, endpoint: str = "", key: CurveKey | None = None, server: bytes = b"", **options: Any
    ) -> Iterator[zmq.Socket[Any]]:
        """A DEALER that says what it likes. Without a key: no security mechanism."""
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
        """Every local socket of the engine, as an endpoint."""
        return [f"ipc://{path}" for path in sorted(Path(self.running.info.shm_dir).glob("*.sock"))]

    def raw(self, endpoint: str = "") -> socket.socket:
        """A connection below ZeroMQ."""
        endpoint = endpoint or self.endpoint
        if endpoint.startswith("ipc://"):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(ANSWER_S)
            made.connect(endpoint.removeprefix("ipc://"))
            return made
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S)

    # -- what it holds ------------------------------------------------------------------------------

    def census(self) -> Census:
        """Count now."""
        found = {process.name: process.pid for process in self.running.status().processes}
        found["supervisor"] = self.running.pid
        return Census(
            found,
            {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in found.items()},
            {name: psutil.Process(pid).memory_info().rss for name, pid in found.items()},
        )

    def warm(self) -> Census:
        """Let every process do once what it does lazily, then count."""
        for kind in BACKGROUND:
            self.running.wait_ready(kind)
        self.passes()
        self.use()
        return self.census()

    def passes(self) -> dict[str, float]:
        """Have the passes made that go over everything; returns how long each of the requests took."""
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
        """Processor time that processes of one kind have had; what else runs on the host is not in it."""
        times = [
            psutil.Process(p).cpu_times() for name, p in self.census().pids.items() if name.startswith(kind)
        ]
        return float(sum(each.user + each.system for each in times))

    def judge(self, before: Census) -> None:
        """After a row: all alive, others served, nothing kept; raises Broken."""
        self.use()
        wrong = ""

        def is_calm() -> bool:
            nonlocal wrong
            try:
                wrong = difference(before, self.census(), self.growth_max)
            except (OSError, psutil.Error) as e:
                wrong = f"a process is gone: {e}"
            return not wrong

        try:
            wait_until(is_calm, CALM_S, "the engine to give back what it took up")
        except RinglogError:
            raise Broken(f"{wrong}\n{self.log_tail()}") from None

    def log_tail(self) -> str:
        """The end of the engine's log."""
        return self.running.log_path.read_text(errors="replace")[-3_000:]


def facts_of(place: Arena) -> dict[str, Any]:
    """What clients see of topics, groups and routers, but for how far background work is."""
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


def came_back(place: Arena) -> None:
    """Kill everything, and again behind a checkpoint: the same facts are there each time; raises Broken."""
    before: dict[str, Any] = {}
    # Whoever may open a shard's socket may take a router from under its scheduler, which asks at a start.
    place.running.kill("scheduler")
    place.running.wait_ready("scheduler")

    def are_settled() -> bool:
        nonlocal before
        last, before = before, facts_of(place)
        return last == before

    wait_until(are_settled, CALM_S, "routers and dead letters to come to rest")
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
            raise Broken(
                f"{len(changed)} facts differ after a recovery from the {how}, first {first}: "
                f"{before.get(first)} became {after.get(first)}"
            )
    place.use()


def difference(before: Census, after: Census, growth_max: int = RSS_GROWTH_BYTES_MAX) -> str:
    """What is not as it was, in words; empty when nothing is."""
    if before.pids != after.pids:
        died = sorted(name for name, pid in before.pids.items() if after.pids.get(name) != pid)
        return f"died: {', '.join(died)}"
    for name in before.pids:
        more = after.descriptors[name] - before.descriptors[name]
        if more > FDS_GROWTH_MAX:
            return f"{name} holds {more} descriptors more than before"
        grown = after.resident[name] - before.resident[name]
        if grown > growth_max:
            return f"{name} grew by {grown >> 20} MiB"
    return ""


# -- starting ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def arena(root: Path, environ: Mapping[str, str] | None = None, **config: Any) -> Iterator[Arena]:
    """Start an engine below `root`, with keys, and a canary in it."""
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
        # Rings that an attack opens are kept for half a minute; they should not look like a leak.
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
            made.use()
            yield made
        finally:
            if made.canary is not None:
                made.canary.close(2.0)
            made.context.destroy(0)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def private_file(path: Path, text: str) -> str:
    """A file of mode 0600 with this text; returns its path."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    return str(path)


# -- saying things ----------------------------------------------------------------------------------------


def ask(peer: zmq.Socket[Any], parts: list[Any], seconds: float = ANSWER_S) -> m.Message | None:
    """Send parts and return the next answer, or None when none comes in time."""
    peer.send_multipart(parts)
    return hear(peer, seconds)


def hear(peer: zmq.Socket[Any], seconds: float = ANSWER_S) -> m.Message | None:
    """The next answer, or None when none comes in time."""
    if not peer.poll(round(seconds * 1000)):
        return None
    try:
        return decode(peer.recv_multipart()[0]).message
    except EnvelopeInvalid as e:
        raise Broken(f"an answer is no envelope: {e}") from e


def hello(peer: zmq.Socket[Any], seconds: float = ANSWER_S) -> bool:
    """Is this peer welcome?"""
    return isinstance(ask(peer, [encode(m.Hello(PROTOCOL, "chaos"), 1)], seconds), m.Welcome)


def a_frame(*payloads: bytes, topic_id: int = 0, **options: Any) -> bytes:
    """A frame of these records as a producer makes it."""
    given = {"epoch": 0, "producer_id": 7, "producer_seq": 1, **options}
    return bytes(frame(encode_records(list(payloads)), topic_id=topic_id, **given))


def a_producer(dice: random.Random) -> int:
    """A producer nobody was yet: what an earlier round wrote is not repeated by it."""
    return dice.getrandbits(48) | 1 << 48


def head_of(client: Client, topic: str) -> int:
    """The last number of a topic, 0 when there is none; what a round writes follows it."""
    try:
        return client.topics.state(topic).head_seq
    except TopicNotFound:
        return 0


def data_of(record: Any) -> bytes:
    """A record's payload; no tombstone is expected where this is used."""
    return bytes(record.data)
