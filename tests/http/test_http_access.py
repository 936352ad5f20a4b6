"""TLS and keys of the HTTP gateway, with one process and with several on one port."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ringlog.testing
from ringlog.access.key_ring import key_id
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.certificates import self_signed
from tests.support.http_client import EventStream, HttpClient
from tests.support.http_processes import client_at

pytestmark = pytest.mark.slow

WAIT_S = 20.0
OWNER, GUEST = (f"rl_{name}_" + "x" * 40 for name in ("owner", "guest"))
TOPIC = "access.t"


@pytest.fixture(params=[1, 3])
def processes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def settings(processes: int, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "port": 0, "processes": processes, **more}


def watch(client: HttpClient) -> str:
    answer = client("POST", "/v0/watch", {"topics": {TOPIC: {}}})
    assert answer.status == 200, answer
    return str(answer.body["stream_url"])


def write(client: HttpClient, data: Any) -> None:
    answer = client("POST", f"/v0/topics/{TOPIC}", {"records": [{"data": data}]})
    assert answer.status in {200, 201}, answer


def client_of(
    opened: ExitStack, engine: TestEngine, processes: int, number: int, key: str = "",
    tls: ssl.SSLContext | None = None,
) -> HttpClient:  # fmt: skip
    """Return a client of one gateway process, which is closed at the end of the block."""
    client = client_at(engine, number, processes, key, tls)
    opened.callback(client.close)
    return client


# -- TLS ----------------------------------------------------------------------------------------------


def test_all_processes_serve_tls(tmp_path: Path, processes: int) -> None:
    """Writes and streams work, also for a process that was started again. Plain HTTP is refused."""
    cert, key = self_signed(tmp_path)
    tls = ssl.create_default_context(cafile=str(cert))
    http = settings(processes, tls_cert_file=str(cert), tls_key_file=str(key))
    with ringlog.testing.engine(http=http, delivery={"schedulers": 1}) as engine, ExitStack() as opened:
        engine.wait_ready("http_gateway")
        assert engine.http_url.startswith("https://")
        at = partial(client_of, opened, engine, processes, tls=tls)
        clients = [at(number) for number in range(processes)]
        write(clients[0], 0)
        with at(processes - 1).into_stream(watch(clients[0])) as stream:
            for number, client in enumerate(clients, 1):
                write(client, "x" * 100_000)
                assert [each["$seq"] for each in stream.records(1 + (number == 1))][-1] == number + 1
        with pytest.raises(ssl.SSLCertVerificationError):
            HttpClient(engine.http_url, tls=ssl.create_default_context())("GET", "/v0/health")
        plain = HttpClient(engine.http_url.replace("https", "http"))
        try:
            found = plain.raw(b"GET /v0/health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        except ConnectionResetError:
            found = b""
        assert b" 200 " not in found, "plain HTTP was served on a TLS port"
        engine.kill("http_gateway", shard=processes - 1)
        engine.wait_ready("http_gateway")
        write(at(processes - 1), "after the kill")


# -- keys ---------------------------------------------------------------------------------------------


def keys_text(**secrets: str) -> str:
    return "".join(
        f'[[keys]]\nname = "{name}"\nbearer_sha256 = "{key_id(secret)}"\n' for name, secret in secrets.items()
    )


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(keys_text(owner=OWNER, guest=GUEST))
    path.chmod(0o600)
    return path


@pytest.fixture
def guarded(keys_file: Path, processes: int) -> Iterator[TestEngine]:
    """An engine whose HTTP gateways want keys."""
    with ringlog.testing.engine(
        http=settings(processes), auth={"keys_file": str(keys_file)}, delivery={"schedulers": 1}
    ) as engine:
        engine.wait_ready("http_gateway")
        yield engine


def change_keys(engine: TestEngine, keys_file: Path, text: str) -> None:
    """Replace the keys file at once: a gateway that polls must not find half a file."""
    changed = keys_file.with_suffix(".new")
    changed.write_text(text)
    changed.chmod(0o600)
    changed.replace(keys_file)
    os.kill(engine.pid, signal.SIGHUP)


def is_over(stream: EventStream) -> bool:
    """Read the stream to its end. Its last event says that the key was revoked."""
    frames = []
    while (frame := stream.frame()) is not None:
        frames.append(frame)
    assert frames, "the stream ended without a word"
    assert "revoked" in str(frames[-1].data), frames[-1]
    return True


def test_a_revoked_key_loses_its_streams_at_all_processes(
    guarded: TestEngine, keys_file: Path, processes: int
) -> None:
    """The streams and requests of the other key continue."""
    with ExitStack() as opened:
        at = partial(client_of, opened, guarded, processes)
        owners = [at(number, OWNER) for number in range(processes)]
        guests = [at(number, GUEST) for number in range(processes)]
        write(owners[0], 1)
        streams = {}
        for key in (OWNER, GUEST):
            for number in range(processes):
                # The session is made at one process, and streamed at the next one.
                path = watch((owners if key == OWNER else guests)[number])
                stream = at((number + 1) % processes, key).into_stream(path)
                streams[key, number] = opened.enter_context(stream)
                assert [each["$seq"] for each in stream.records(1)] == [1]
        change_keys(guarded, keys_file, keys_text(owner=OWNER))
        assert all(is_over(streams[GUEST, number]) for number in range(processes))
        wait_until(
            lambda: {guest("GET", "/v0/topics").status for guest in guests} == {401}, WAIT_S, "401 for guests"
        )
        for owner in owners:
            write(owner, 2)
        for number in range(processes):
            assert len(streams[OWNER, number].records(processes)) == processes


def test_a_session_belongs_to_its_key_at_all_processes(guarded: TestEngine, processes: int) -> None:
    with ExitStack() as opened:
        at = partial(client_of, opened, guarded, processes)
        owner = at(0, OWNER)
        write(owner, 1)
        path, statuses = watch(owner), set()
        for number in range(processes):
            with at(number, GUEST).into_stream(path) as stream:
                statuses.add(stream.status)
        assert statuses == {401}
        with at(processes - 1, OWNER).into_stream(path) as stream:
            assert [each["$seq"] for each in stream.records(1)] == [1]


# -- changed rights -----------------------------------------------------------------------------------


def test_a_session_does_not_outlive_the_rights_of_its_key(
    guarded: TestEngine, keys_file: Path, processes: int
) -> None:
    """Where it is, and where it would go: neither its stream nor a HEAD says anything about its topics."""
    with ExitStack() as opened:
        at = partial(client_of, opened, guarded, processes)
        guests = [at(number, GUEST) for number in range(processes)]
        write(guests[0], 1)
        path = watch(guests[0])
        with at(0, GUEST).into_stream(path) as stream:
            assert [each["$seq"] for each in stream.records(1)] == [1]
            text = keys_text(owner=OWNER, guest=GUEST) + 'prefixes = ["b."]\n'
            change_keys(guarded, keys_file, text)
            assert is_over(stream)
        wait_until(
            lambda: {each("GET", f"/v0/topics/{TOPIC}").status for each in guests} == {403}, WAIT_S, "403"
        )
        write(at(0, OWNER), 2)
        for number in reversed(range(processes)):
            assert guests[number]("HEAD", path).status == 403
        for number in reversed(range(processes)):
            with at(number, GUEST).into_stream(path) as stream:
                assert stream.status == 403
                assert stream.json()["error"]["code"] == "forbidden"
        change_keys(guarded, keys_file, keys_text(owner=OWNER, guest=GUEST))
        wait_until(
            lambda: {each("GET", f"/v0/topics/{TOPIC}").status for each in guests} == {200}, WAIT_S, "200"
        )
        with at(processes - 1, GUEST).into_stream(path) as stream:
            assert [each["$seq"] for each in stream.records(1)] == [2], "the session was not lost"


def test_another_key_of_one_name_ends_the_streams_of_the_first(
    guarded: TestEngine, keys_file: Path, processes: int
) -> None:
    """Name and rights stay. The session goes on for the new key."""
    with ExitStack() as opened:
        at = partial(client_of, opened, guarded, processes)
        guest = at(0, GUEST)
        write(guest, 1)
        path, following = watch(guest), "rl_next_" + "x" * 40
        with at(0, GUEST).into_stream(path) as stream:
            assert [each["$seq"] for each in stream.records(1)] == [1]
            change_keys(guarded, keys_file, keys_text(owner=OWNER, guest=following))
            assert is_over(stream)
        followers = [at(number, following) for number in range(processes)]

        def statuses() -> list[int]:
            return [client("GET", "/v0/topics").status for client in (guest, *followers)]

        wait_until(lambda: statuses() == [401, *[200] * processes], WAIT_S, "all know the new key")
        write(at(0, OWNER), 2)
        with at(processes - 1, following).into_stream(path) as stream:
            assert stream.status == 200
            assert [each["$seq"] for each in stream.records(1)] == [2]
