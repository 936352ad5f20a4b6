"""Several gateway processes on one port: clients do not notice how many there are."""

from __future__ import annotations

import base64
import json
import os
import signal
import string
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import ringlog.testing
from ringlog.cli import main
from ringlog.cli.outcome import CliExit
from ringlog.errors import StartRefused
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture
from tests.support.http_client import EventStream, HttpClient
from tests.support.http_metrics import samples
from tests.support.http_processes import client_at, clients_of, requests_of, stream_at
from tests.support.http_queues import make_queue, put

pytestmark = pytest.mark.slow

PROCESSES = 3
WAIT_S = 30.0
BASE64URL = string.ascii_letters + string.digits + "-_"
SETTINGS: dict[str, Any] = {"enabled": True, "port": 0, "processes": PROCESSES}

http_engine = engine_fixture("module", ready="http_gateway", http=SETTINGS, delivery={"schedulers": 1})
"""A running engine of this module with three gateway processes, without keys."""


@pytest.fixture
def clients(http_engine: TestEngine) -> Iterator[list[HttpClient]]:
    with clients_of(http_engine, PROCESSES) as found:
        yield found


def write(call: HttpClient, topic: str, *data: object) -> None:
    reply = call("POST", f"/v0/topics/{topic}", {"records": [{"data": one} for one in data]})
    assert reply.status in {200, 201}, reply


def watch(call: HttpClient, *topics: str, **fields: Any) -> str:
    """Make a watch session, and return its path."""
    answer = call("POST", "/v0/watch", {"topics": {name: {} for name in topics}, **fields})
    assert answer.status == 200, answer
    return str(answer.body["stream_url"])


def seqs(stream: EventStream, count: int) -> list[int]:
    return [one["$seq"] for one in stream.records(count)]


def has_ended(stream: EventStream) -> bool:
    """Read to the end of a stream that has sent all its records."""
    while (frame := stream.frame()) is not None:
        assert frame.event == "caught-up", frame
    return True


@pytest.fixture
def open_at(http_engine: TestEngine) -> Iterator[Callable[..., EventStream]]:
    """`open_at(number, path, headers)` opens an event stream at a gateway process, and closes it at the
    end."""
    with ExitStack() as opened:

        def open_stream(number: int, path: str, **options: Any) -> EventStream:
            stream = stream_at(http_engine, number, PROCESSES, path, **options)
            opened.callback(stream.close)
            return stream

        yield open_stream


# -- one port -----------------------------------------------------------------------------------------


def test_connections_reach_every_process(http_engine: TestEngine, clients: list[HttpClient]) -> None:
    """The fixture has found a connection to each of them."""
    before = requests_of(http_engine, PROCESSES)
    for client in clients:
        assert client("GET", "/v0/health").status == 200
    assert requests_of(http_engine, PROCESSES) == [count + 1 for count in before]
    names = [each.name for each in http_engine.status().processes if each.kind == "http_gateway"]
    assert names == ["http_gateway-00", "http_gateway-01", "http_gateway-02"]


def test_what_one_process_wrote_is_there_in_the_others(clients: list[HttpClient], topic: str) -> None:
    for round_ in range(10):
        for writer in clients:
            write(writer, topic, round_)
            found = [call("POST", f"/v0/topics/{topic}/diff", {}).body["head_seq"] for call in clients]
            assert len(set(found)) == 1, found


def test_a_repeated_write_at_another_process_is_recognised(clients: list[HttpClient], topic: str) -> None:
    body = {"records": [{"data": 1}], "idempotency_key": "once"}
    first, *others = [call("POST", f"/v0/topics/{topic}", body).body for call in clients]
    assert [(each["seqs"], each["deduped"]) for each in others] == [(first["seqs"], True)] * len(others)


def test_a_second_engine_is_refused_on_the_port(http_engine: TestEngine) -> None:
    port = int(http_engine.http_url.rpartition(":")[2])
    with pytest.raises(StartRefused) as caught, ringlog.testing.engine(http={**SETTINGS, "port": port}):
        pass
    assert f"port {port}: stop what listens there" in str(caught.value.detail["log"])


@pytest.mark.parametrize("words", [["config", "check"], ["serve", "--check"]])
def test_a_check_of_the_settings_passes_while_the_engine_has_the_port(
    http_engine: TestEngine, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an upgrade checks the settings of the running engine before the restart."""
    monkeypatch.chdir(tmp_path)
    port = http_engine.http_url.rpartition(":")[2]
    code = main([*words, "--set", "http.enabled=true", "--set", f"http.port={port}"])
    assert code == CliExit.DONE


@pytest.mark.timeout(120)
def test_a_killed_process_comes_back_on_the_port(http_engine: TestEngine, clients: list[HttpClient]) -> None:
    """The others go on serving. Its sessions are lost, and those that it has made for others are not."""
    topic = "t.killed"
    write(clients[0], topic, 1)
    lost, kept = watch(clients[1], topic), watch(clients[1], topic)
    with stream_at(http_engine, 0, PROCESSES, kept) as stream:
        assert seqs(stream, 1) == [1]
        url = http_engine.http_url
        killed = http_engine.kill("http_gateway", shard=1)
        write(clients[2], topic, 2)
        assert seqs(stream, 1) == [2], "the stream at another process does not end"
        wait_until(lambda: http_engine.pid_of("http_gateway", 1) != killed, WAIT_S, "a successor")
        http_engine.wait_ready("http_gateway")
        assert http_engine.http_url == url
        with client_at(http_engine, 1, PROCESSES).into_stream(kept) as later:
            assert has_ended(stream), "the newer stream takes over"
            write(clients[2], topic, 3)
            assert seqs(later, 1) == [3]
    for number in range(PROCESSES):
        client = client_at(http_engine, number, PROCESSES)
        assert client("GET", lost).status == 404
        client.close()


# -- watch sessions -----------------------------------------------------------------------------------


def test_a_session_streams_at_any_process(clients: list[HttpClient], open_at: Any, topic: str) -> None:
    write(clients[0], topic, 1)
    path = watch(clients[0], topic)
    written, last = 1, ""
    earlier: EventStream | None = None
    for number in (1, 2, 0, 2, 1, 1, 0):
        stream = open_at(number, path, headers={"last-event-id": last} if last else None)
        if earlier is not None:
            assert has_ended(earlier), "the new stream takes over"
        write(clients[2], topic, written + 1)
        if written == 1:
            assert seqs(stream, 2) == [1, 2]
        else:
            record = stream.until(lambda frame: frame.event == "record")[-1]
            assert [one["$seq"] for one in record.data["records"]] == [written + 1]
            last = record.id if written % 2 else ""
        written, earlier = written + 1, stream


def test_a_session_resumes_at_an_event_at_another_process(
    clients: list[HttpClient], open_at: Any, topic: str
) -> None:
    write(clients[0], topic, *range(1, 6))
    path = watch(clients[0], topic, limit=2)
    stream = open_at(1, path)
    first = stream.frames(3)
    assert [one["$seq"] for frame in first[:2] for one in frame.data["records"]] == [1, 2, 3, 4]
    again = open_at(2, path, headers={"last-event-id": first[0].id})
    assert seqs(again, 3) == [3, 4, 5]
    ahead = base64.urlsafe_b64encode(json.dumps({topic: 99}).encode()).decode()
    beyond = open_at(0, path, headers={"last-event-id": ahead})
    write(clients[1], topic, 6)
    assert seqs(beyond, 1) == [6], "a client never skips records"


def test_a_session_moves_with_its_options(clients: list[HttpClient], open_at: Any, topic: str) -> None:
    names = [f"{topic}.{number}" for number in range(3)]
    for name in names:
        write(clients[0], name, 0)
    path = watch(
        clients[0], *names, filter="blue", node="me", include_data=False, include_tags=True, limit=1,
        consistency="strong", heartbeat_ms=1_000,
    )  # fmt: skip
    stream = open_at(1, path)
    records = [{"data": 1, "tag": tag, "node": node} for tag in ("blue", "red") for node in ("me", "you")]
    for name in names:
        clients[2]("POST", f"/v0/topics/{name}", {"records": records})
    found = stream.records(3)
    assert {(one["$tag"], one["$node"]) for one in found} == {("blue", "you")}
    assert not any("data" in one for one in found)
    assert stream.until(lambda frame: frame.event == "caught-up")
    while (block := stream.block()) is not None and not block.comment.startswith("hb "):
        pass
    assert block is not None, "heartbeats come as often as the client asked for"


@pytest.mark.timeout(120)
def test_a_session_that_moves_while_records_come_misses_none(
    clients: list[HttpClient], open_at: Any, topic: str
) -> None:
    count, moves = 300, 12
    write(clients[0], topic, 0)
    path = watch(clients[0], topic)
    found: list[int] = []
    last = ""
    writer = threading.Thread(target=lambda: [write(clients[2], topic, n) for n in range(1, count)])
    streams = [HttpClient(clients[0].url) for _ in range(moves)]
    writer.start()
    for client in streams:  # Wherever each of them arrives.
        with client.stream(path, {"last-event-id": last} if last else {}) as stream:
            wanted = len(found) + count // (2 * moves)
            while len(found) < wanted:
                frame = stream.frame()
                assert frame is not None, "the newest stream goes on"
                if frame.event == "record":
                    found += [one["$seq"] for one in frame.data["records"]]
                last = frame.id or last
    writer.join()
    with streams[0].stream(path, {"last-event-id": last}) as stream:
        found += seqs(stream, count - len(found)) if len(found) < count else []
    assert found == list(range(1, count + 1))


@pytest.mark.timeout(120)
def test_streams_that_begin_together_leave_one(clients: list[HttpClient], topic: str) -> None:
    """Whatever the order: the session is at one process in the end, and no record is lost."""
    write(clients[0], topic, 1)
    path = watch(clients[0], topic)
    for round_ in range(10):
        opened: list[EventStream] = []
        lock, begun = threading.Lock(), threading.Barrier(6)

        def begin(opened: list[EventStream] = opened, lock: Any = lock, begun: Any = begun) -> None:
            begun.wait()
            stream = clients[0].stream(path)
            with lock:
                opened.append(stream)

        threads = [threading.Thread(target=begin) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [stream.status for stream in opened] == [200] * 6
        for stream in opened:
            stream.close()
        with clients[0].stream(path) as last:
            assert last.status == 200
            write(clients[1], topic, round_)
            while seqs(last, 1)[-1] < round_ + 2:
                pass
    assert clients[0]("HEAD", path).status == 200


def test_head_leaves_a_session_where_it_is(clients: list[HttpClient], open_at: Any, topic: str) -> None:
    write(clients[0], topic, 1)
    path = watch(clients[0], topic)
    stream = open_at(1, path)
    assert seqs(stream, 1) == [1]
    assert [call("HEAD", path).status for call in clients] == [200] * PROCESSES
    write(clients[0], topic, 2)
    assert seqs(stream, 1) == [2]


def test_names_that_no_process_has_made_are_not_found(clients: list[HttpClient], topic: str) -> None:
    write(clients[0], topic, 1)
    made = watch(clients[0], topic).rpartition("/")[2]
    secret = made.removeprefix("wid_")
    hostile = [
        *(f"wid_{secret[:-1]}{last}" for last in BASE64URL if last != secret[-1]),
        f"wid_{secret[:-1]}", f"wid_{secret}x", f"wid_{secret}%0A", f"wid_0_{secret}", f"wid_{'A' * 22}",
        f"wid_{'A' * 21}P", "wid_" + 22 * "%D9%A0", "wid_0_", "wid_", "wid", "%00", "..", f"WID_{secret}",
        f"wid_{'A' * 60_000}",
    ]  # fmt: skip
    for client in clients:
        for method in ("GET", "HEAD"):
            found = {wid[:150]: client(method, f"/v0/watch/{wid}").status for wid in hostile}
            assert set(found.values()) <= {404, 431}, found
    assert clients[0]("HEAD", f"/v0/watch/{made}").status == 200


@pytest.mark.timeout(120)
def test_a_process_that_does_not_answer_keeps_nobody_waiting(
    http_engine: TestEngine, clients: list[HttpClient], topic: str
) -> None:
    write(clients[0], topic, 1)
    path = watch(clients[1], topic)
    pid = http_engine.pid_of("http_gateway", 1)
    client, late = (client_at(http_engine, number, PROCESSES) for number in (0, 2))
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = client("GET", path)
        assert (answer.status, answer.body["error"]["code"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) >= 1
        assert late("HEAD", path).status == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    with client.into_stream(path) as stream:
        assert stream.status == 200
        assert seqs(stream, 1) == [1]
    client.close()
    late.close()


OWNER, OTHER = "owner-" + "a" * 40, "other-" + "b" * 40


@pytest.mark.timeout(120)
def test_sessions_belong_to_their_key_and_a_stop_ends_all_streams() -> None:
    http, environ = {**SETTINGS, "processes": 2}, {"RINGLOG_API_KEYS": f"{OWNER},{OTHER}"}
    with ringlog.testing.engine(http=http, environ=environ) as running, ExitStack() as opened:
        running.wait_ready("http_gateway")

        def client(number: int, key: str) -> HttpClient:
            found = client_at(running, number, 2, key)
            opened.callback(found.close)
            return found

        owner, other, intruder = client(0, OWNER), client(0, OTHER), client(1, OTHER)
        write(owner, "keyed", 1)
        path = watch(owner, "keyed")
        stream = opened.enter_context(client(1, OWNER).into_stream(path))
        second = opened.enter_context(client(0, OTHER).into_stream(watch(other, "keyed")))
        assert seqs(stream, 1) == seqs(second, 1) == [1]
        answers = [call("GET", path) for call in (other, intruder)]
        assert [answer.status for answer in answers] == [401, 401]
        assert answers[0].body == answers[1].body
        assert [call("HEAD", path).status for call in (other, intruder, owner)] == [401, 401, 200]
        write(owner, "keyed", 2)
        assert seqs(stream, 1) == seqs(second, 1) == [2], "a refused request has ended no stream"
        running.stop()
        for each in (stream, second):
            last = each.until(lambda frame: frame.event == "error")[-1]
            assert (last.data["code"], last.data["error"]) == (503, "shutting_down")
            assert each.frame() is None


# -- work streams and metrics ---------------------------------------------------------------------------


def test_jobs_settled_at_another_process_free_slots_at_once(
    clients: list[HttpClient], open_at: Any, request: pytest.FixtureRequest
) -> None:
    """The stream of `ticks` gets its next job only by the periodic check of its leases: it counts the
    checks."""
    queue, ticks = make_queue(clients[0], request), "q-ticks"
    clients[0]("PUT", f"/v0/topics/{ticks}", {"type": "queue"})
    jobs = 20
    put(clients[0], queue, *range(jobs))
    put(clients[0], ticks, *range(jobs))
    clock = open_at(0, f"/v0/topics/{ticks}/work?node=s&lease_ms=100")
    stream = open_at(0, f"/v0/topics/{queue}/work?node=s&max=1")
    assert clock.frame().event == "job"
    for number in range(jobs):
        job = stream.frame().data
        assert job["$seq"] == number + 1
        settled = clients[1 + number % 2](
            "POST", f"/v0/topics/{queue}/ack", {"node": "s", "seqs": [job["$seq"]]}
        )
        assert settled.body["acked"] == 1
    checks = 0
    while not clock.is_silent(0):
        checks += bool(clock.block())
    assert checks < jobs // 2, "so the slots were freed by notices"


def answered(call: HttpClient, route: str, status: int = 200) -> int:
    """Return how often all processes together have answered, from both forms of the metrics."""
    text = samples(call("GET", "/v0/metrics").body)
    rows = call("GET", "/v0/metrics", headers={"accept": "application/json"}).body["http_requests_total"]
    labels = {"route": route, "status": str(status)}
    (found,) = [row["value"] for row in rows if row["labels"] == labels] or [0]
    assert text.get(("ringlog_http_requests_total", (route, str(status))), 0) == found
    return int(found)


def gauges(call: HttpClient, names: Sequence[str]) -> list[float]:
    found = samples(call("GET", "/v0/metrics").body)
    return [found[f"ringlog_{name}", ()] for name in names]


@pytest.mark.timeout(120)
def test_metrics_are_sums_over_all_processes(
    http_engine: TestEngine, clients: list[HttpClient], open_at: Any, topic: str
) -> None:
    route = "GET /v0/topics"
    before = [answered(call, route) for call in clients]
    assert len(set(before)) == 1
    for number, call in enumerate(clients):
        for _ in range(number + 1):
            assert call("GET", "/v0/topics").status == 200
    assert [answered(call, route) for call in clients] == [before[0] + 6] * PROCESSES
    names = ("sse_connections", "http_watch_sessions")
    streams, sessions = gauges(clients[0], names)
    write(clients[0], topic, 1)
    opened = [open_at(number, watch(clients[number], topic)) for number in (1, 2)]
    assert [seqs(stream, 1) for stream in opened] == [[1], [1]]
    assert [gauges(call, names) for call in clients] == [[streams + 2, sessions + 2]] * PROCESSES
    http_engine.kill("http_gateway", shard=2)
    assert answered(clients[0], route) == before[0] + 6, "a counter never falls"
    http_engine.wait_ready("http_gateway")
    successor = client_at(http_engine, 2, PROCESSES)
    assert successor("GET", "/v0/topics").status == 200
    assert [answered(call, route) for call in (clients[0], successor)] == [before[0] + 7] * 2
    assert gauges(successor, names)[0] == streams + 1
    successor.close()
