"""A key with a prefix tries to reach topics outside it, in a real engine. Slow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import zmq

import ringlog
from ringlog.client import EARLIEST
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL, decode
from ringlog.errors import Forbidden, InvalidRequest
from ringlog.link.curve import CurveKey, key_file_text, new_key
from ringlog.testing.real_engine import TestEngine, engine, wait_until
from tests.support.machine import free_port, private_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SERVER = new_key()
KEYS: dict[str, tuple[CurveKey, str]] = {
    "owner": (new_key(), ""),
    "reader": (new_key(), 'scopes = ["read"]\nprefixes = ["a."]\n'),
    "worker": (new_key(), 'scopes = ["read", "write"]\nprefixes = ["a."]\n'),
    "all-of-a": (new_key(), 'prefixes = ["a."]\n'),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    place = tmp_path_factory.mktemp("keys")
    entries = [
        f'[[keys]]\nname = "{name}"\npublic_key = "{key.public.decode()}"\n{rights}'
        for name, (key, rights) in KEYS.items()
    ]
    with engine(
        gateway={"enabled": True}, delivery={"schedulers": 1},
        native={
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "curve_key_file": private_file(place / "server.key", key_file_text(SERVER)),
        },
        auth={"keys_file": private_file(place / "keys.toml", "".join(entries))},
    ) as running:  # fmt: skip
        yield running


def connect(house: TestEngine, name: str) -> ringlog.Client:
    port = house.info.gateway_tcp.rsplit(":", 1)[1]
    url = f"ringlog://127.0.0.1:{port}?server_key={quote(SERVER.public, safe='')}"
    return ringlog.connect(url, key=KEYS[name][0].secret.decode(), wait=20)


@pytest.fixture(scope="module")
def owner(house: TestEngine) -> Iterator[ringlog.Client]:
    with connect(house, "owner") as client:
        client.topics.create("a.log")
        client.topics.create("a.queue", type="queue")
        client.topics.create("b.log")
        client.topics.create("a.kept", cap_records=10, retain_until_acked=True, hard_cap_records=1_000)
        client.append("a.log", b"one")
        client.append("b.log", b"not theirs")
        yield client


def group(client: ringlog.Client, **limits: Any) -> Any:
    return client.group("a.log", "g", mode="queue", **limits)


@contextlib.contextmanager
def peer(endpoint: str, key: CurveKey | None = None) -> Iterator[zmq.Socket[Any]]:
    """Yield a DEALER socket that can send any bytes."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        if key is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, SERVER.public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        dealer.connect(endpoint)
        yield dealer
    finally:
        dealer.close(0)
        context.term()


def asked(dealer: zmq.Socket[Any], kind: str, body: list[Any], corr: int) -> m.Message:
    """Send a body unchanged and return the reply to this request."""
    dealer.send(msgspec.msgpack.encode([PROTOCOL, kind, corr, body]))
    assert dealer.poll(20_000), f"no answer to {kind} {body}"
    answer = decode(dealer.recv_multipart()[0])
    assert answer.corr == corr
    return answer.message


HOSTILE: dict[str, tuple[str, list[tuple[str, list[Any], str]]]] = {
    "the gateway": ("", [
        ("Subscribe", [-1, [], 1], "subscription"), ("Subscribe", [1 << 40, [], 1], "subscription"),
        ("GrantsReturned", [-1], "grants"), ("Read", ["a.log", -1], "after"),
        ("SeekTime", ["a.log", 1 << 63], "ts"),
        ("Claim", ["a.log", "w", 1, 0, 0, 0, -1, 0, False, "g"], "pid"),
        ("Unsubscribe", [1, [-1]], "feeds[0]"),
        ("RoutesSettle", ["a.log", -5, 0], "topic_id"), ("TopicList", ["", "", -1], "page_size"),
    ]),
    "a shard": ("wal_shard-00.sock", [
        ("Claim", ["a.queue", "w", 1, 0, 0, 0, -1, 1], "pid"),
        ("Claim", ["a.queue", "w", 1, 0, 0, 0, 1 << 40, 1], "pid"),
        ("RouterPut", [[1, "a.r", "a.log", -1, 1, "b.log", 2, 0, "", 0]], "facts.source_id"),
        ("CheckpointDone", [-1, []], "number"), ("SegmentTier", [1, -1], "tier"),
    ]),
    "a scheduler": ("scheduler-00.sock", [
        ("RoutesSettle", ["a.log", -1, 0], "topic_id"), ("Subscribe", [1, [[1, "a.log", -1, 0, 0, 0]], 1],
         "feeds[0].topic_id"),
        ("NotifyRouterChange", [[1, "a.r", "a.log", -1, 1, "b.log", 2, 0, "", 0]], "facts.source_id"),
        ("NotifyRouterChange", [[1, "a.r", "a.log", 1, 1, "b.log", 2, 0, "none", 0]], "filter"),
        ("RouterGet", ["r", 1 << 60], "settle_ms"),
    ]),
    "the supervisor": ("supervisor.sock", [
        ("RingOpen", ["c", -1, 0], "pid"), ("RingOpen", ["c", 1 << 40, 0], "pid"),
        ("RingOpen", ["c", 1, -1], "shard"), ("RingOpen", ["c", 1, 0, 1 << 63], "ring_bytes"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("whom", HOSTILE)
def test_an_invalid_number_is_an_error_for_its_sender_and_ends_no_process(
    house: TestEngine, owner: ringlog.Client, whom: str
) -> None:
    """Six such messages once made the supervisor give up the gateway."""
    before = {each.name: each.pid for each in house.status().processes}
    socket_name, messages = HOSTILE[whom]
    key = None if socket_name else KEYS["reader"][0]
    endpoint = f"ipc://{house.info.shm_dir}/{socket_name}" if socket_name else house.info.gateway_tcp
    with peer(endpoint, key) as dealer:
        for corr, (kind, body, field) in enumerate(messages * 6, 1):
            answer = asked(dealer, kind, body, corr)
            assert isinstance(answer, m.ErrorReply), (kind, body, answer)
            assert answer.status == InvalidRequest.status
            assert answer.detail["field"] == field
        assert isinstance(asked(dealer, "Ping", [], 9), m.Pong)
    assert {each.name: each.pid for each in house.status().processes} == before
    owner.append("a.log", b"goes on")


WAYS: dict[str, Callable[[ringlog.Client], Any]] = {
    "a group rejects": lambda c: group(c, dead_letter="b.log").claim(),
    "a group makes": lambda c: group(c, dead_letter="b.new", max_deliveries=1).claim(),
    "a topic is made with": lambda c: c.topics.create("a.q2", type="queue", dead_letter="b.log"),
    "a topic is made for": lambda c: c.topics.create("a.q3", type="queue", dead_letter="b.new"),
    "a queue is configured": lambda c: c.topics.configure("a.queue", dead_letter="b.log"),
    "a log is configured": lambda c: c.topics.configure("a.log", dead_letter="b.new"),
    "a router leads to": lambda c: c.routers.create("a.router", "a.log", "b.log"),
    "a router makes": lambda c: c.routers.create("a.router", "a.log", "b.new"),
    "a router leads from": lambda c: c.routers.create("a.router", "b.log", "a.log"),
    "a router is called": lambda c: c.routers.create("b.router", "a.log", "a.dest"),
}


@pytest.mark.parametrize("key", ["reader", "worker", "all-of-a"])
@pytest.mark.parametrize("way", WAYS)
def test_no_request_reaches_a_topic_outside_the_keys_prefixes(
    house: TestEngine, owner: ringlog.Client, way: str, key: str
) -> None:
    """After the refusal, topics, groups and routers are unchanged."""
    before = {each.topic: each.head_seq for each in owner.topics.list("b.")}
    with connect(house, key) as client, pytest.raises(Forbidden):
        WAYS[way](client)
    assert {each.topic: each.head_seq for each in owner.topics.list("b.")} == before
    assert not owner.topics.groups("a.log")
    assert not list(owner.routers.list())


def test_dead_letters_go_to_a_topic_that_the_key_may_write(house: TestEngine, owner: ringlog.Client) -> None:
    """The key has access to both topics."""
    with connect(house, "worker") as client:
        members = client.group("a.log", "own", mode="queue", start=EARLIEST, dead_letter="a.dead")
        job = members.claim(wait_ms=5_000)[0]
        members.reject(job, "no")
        wait_until(lambda: [each.topic for each in owner.topics.list("a.dead")] != [], 20, "the dead letter")
        owner.group("a.log", "own", mode="queue").delete()


def test_a_worker_needs_no_permission_for_the_dead_letters_of_its_queue(
    house: TestEngine, owner: ringlog.Client
) -> None:
    """The permission was checked when the dead-letter topic was configured. A redrive checks it again."""
    owner.topics.create("a.work", type="queue", dead_letter="b.dead")
    with connect(house, "worker") as client:
        client.queue("a.work").put(b"job")
        job = client.queue("a.work").claim(wait_ms=5_000)[0]
        client.queue("a.work").reject(job, "no")
        wait_until(lambda: [each.count for each in owner.topics.list("b.dead")] == [1], 20, "the dead letter")
        with pytest.raises(Forbidden):
            client.queue("a.work").redrive()
    assert owner.topics.state("b.dead").count == 1


def test_only_a_key_with_admin_creates_or_moves_a_group_that_retains_records(
    house: TestEngine, owner: ringlog.Client
) -> None:
    """Without a group the topic keeps 10 records. A group in queue mode would make it keep 1,000."""
    for key in ("reader", "worker"):
        with connect(house, key) as client:
            with pytest.raises(Forbidden) as refused:
                client.group("a.kept", key, mode="queue").claim()
            assert refused.value.detail["required_scope"] == "admin"
            # Groups in stream mode retain no records.
            assert client.group("a.kept", f"{key}-stream", mode="stream").stats().cursor == 1
    for _ in range(30):
        owner.append("a.kept", b"x")
    assert owner.topics.state("a.kept").count == 10
    with connect(house, "all-of-a") as client:
        client.group("a.kept", "made", mode="queue").claim()
    with connect(house, "reader") as client:
        member = client.group("a.kept", "made", mode="queue")
        member.ack(member.claim(max=5, wait_ms=5_000))
        with pytest.raises(Forbidden):
            member.seek(EARLIEST)
        client.group("a.kept", "reader-stream", mode="stream").seek(EARLIEST)


def test_the_key_file_of_the_docs_admits_a_client(
    house: TestEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`RINGLOG_KEY_FILE` as docs/explanation/security.md shows it."""
    path = private_file(tmp_path / "reader.key", key_file_text(KEYS["reader"][0]))
    monkeypatch.setenv("RINGLOG_KEY_FILE", path)
    port = house.info.gateway_tcp.rsplit(":", 1)[1]
    url = f"ringlog://127.0.0.1:{port}?server_key={quote(SERVER.public, safe='')}"
    with ringlog.connect(url, wait=20) as client:
        assert client.topics.state("a.log").topic == "a.log"
