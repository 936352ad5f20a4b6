"""Every public call refuses values that its parameters do not accept.

The tests cover rings and ipc, the threaded client and the asyncio client. A call fails with `UsageError` or
`InvalidRequest` that names the parameter, before it waits. The client works afterwards.

The tests find calls and parameters by introspection of the classes, so they cover new parameters
automatically. A parameter that accepts a value of `BAD` has a row in `TAKEN`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ringlog
import ringlog.aio
from ringlog.client.leases.group_facts import GroupLimits
from ringlog.client.read.pages import Cursor
from ringlog.client.write.fields import RecordFields
from ringlog.errors import InvalidRequest, UsageError
from ringlog.names import utf8
from ringlog.settings import TOPIC_SETTINGS

NAN = float("nan")
TOPIC, QUEUE = "bad-arguments.topic", "bad-arguments.queue"
BAD: dict[str, Any] = {
    "an object": object(), "a lone surrogate": "\ud800", "NaN": NAN, "2.5": 2.5, "-5": -5, "2**70": 1 << 70,
    "bytes": b"\xff", "a set with NaN": {NAN}, "a mapping": {"a": NAN}, "a list": [object()],
}  # fmt: skip
TAKEN: dict[str, set[str]] = {
    "data": {"bytes"},
    "key": {"bytes"},
    "event_ts": {"-5"},
    "expires_at": {"-5"},
    "not_before": {"-5"},
    "reason": {"a lone surrogate"},
    "linger_ms": {"2.5"},
    "timeout": {"2.5"},
    "timeout_s": {"2.5"},
    "settle_s": {"2.5"},
    "idle_s": {"2.5"},
    "rate": {"2.5"},
    "topics.priority": {"-5"},
}
"""Values of `BAD` that parameters of these names accept."""
NOT_FOR_USERS = {"run", "restart_in_child", "nack_with_backoff", "pipeline_ack"}
"""Public methods that only other parts of the client call."""
GOOD: dict[str, Any] = {
    "topic": TOPIC, "data": b"x", "name": "n", "source": TOPIC, "dest": "other", "topics": [TOPIC],
    "records": [b"x"],
    "payloads": [b"x"], "jobs": [], "seqs": [1], "after": 0, "start": 0, "lease_ms": 1_000, "producer_id": 7,
    "timeout": 1.0, "watches": [],
}  # fmt: skip
UNDER_NAMES: dict[str, list[str]] = {
    "record": list(RecordFields.__annotations__),
    "limits": list(GroupLimits.__annotations__),
    "config": list(TOPIC_SETTINGS),
}
"""Names of the keyword arguments that a call accepts as `**record` and the like."""


def parameters_of(method: Any) -> Iterator[tuple[str, bool, bool]]:
    """Yield `(name, is positional-only, is required)` for each parameter."""
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from ((name, False, False) for name in UNDER_NAMES[parameter.name])
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            is_needed = parameter.default is parameter.empty
            yield parameter.name, parameter.kind is parameter.POSITIONAL_ONLY, is_needed


def calls_of(holder: Any, label: str) -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """Yield `(label, method, positional arguments, keyword arguments)` for every call with one bad value."""
    for method in dir(type(holder)):
        found = getattr(type(holder), method)
        if method.startswith("_") or method in NOT_FOR_USERS or not inspect.isfunction(found):
            continue
        parameters = list(parameters_of(found))
        for name, _, _ in parameters:
            for kind, bad in BAD.items():
                if kind in TAKEN.get(name, ()) or kind in TAKEN.get(f"{label}.{name}", ()):
                    continue
                needed = [other for other, _, is_needed in parameters if is_needed]
                given = {other: GOOD.get(other) for other in needed} | {name: bad}
                places = [given.pop(other) for other, is_place, _ in parameters if is_place]
                yield f"{label}.{method}({name}={kind})", method, tuple(places), given


def holders_of(client: Any) -> Iterator[tuple[str, Any]]:
    yield "client", client
    yield "topics", client.topics
    yield "routers", client.routers
    yield "queue", client.queue(QUEUE)
    yield "group", client.group(TOPIC, "work", mode="queue")
    yield "producer", client.producer(TOPIC)
    yield "reader", client.reader(TOPIC)
    yield "watch", client.watch(TOPIC)


def verdict(error: BaseException | None, found: object) -> str:
    """Return "" if the error is an expected refusal, else a description of the actual outcome."""
    if error is None:
        return f"it was taken: {found!r}"[:120]
    str(error).encode()
    return "" if isinstance(error, UsageError | InvalidRequest) else repr(error)


def try_all(client: ringlog.Client) -> list[str]:
    return [told for label, holder in holders_of(client) for told in try_one(label, holder)]


def try_one(label: str, holder: Any) -> list[str]:
    wrong, tried = [], 0
    for told, method, places, given in calls_of(holder, label):
        found = error = None
        try:
            found = getattr(holder, method)(*places, **given)
        except Exception as e:  # noqa: BLE001  it is what the test is about
            error = e
        tried += 1
        if came := verdict(error, found):
            wrong.append(f"{told}: {came}")
    assert tried
    return wrong


async def try_all_in_loop(client: ringlog.aio.Client) -> list[str]:
    wrong, tried = [], 0
    for label, holder in holders_of(client):
        for told, method, places, given in calls_of(holder, label):
            found = error = None
            try:
                found = getattr(holder, method)(*places, **given)
                # An iterator checks its arguments when its first item is requested.
                if inspect.isasyncgen(found):
                    found = await asyncio.wait_for(anext(found), 2)
                elif inspect.isawaitable(found):
                    found = await asyncio.wait_for(found, 2)
            except Exception as e:  # noqa: BLE001  it is what the test is about
                error = e
            tried += 1
            if came := verdict(error, found):
                wrong.append(f"{told}: {came}")
    assert tried > 1_000
    return wrong


@pytest.fixture(scope="module")
def engine(ringlog_engine: Any) -> Any:
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.topics.create(TOPIC, exist_ok=True)
        client.topics.create(QUEUE, type="queue", exist_ok=True)
        client.append(TOPIC, b"first")
    return ringlog_engine


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_client_refuses_values_that_no_parameter_accepts(engine: Any, transport: Any) -> None:
    with ringlog.connect(engine.url, transport=transport, wait=10) as client:
        assert try_all(client) == []
        seq = client.append(TOPIC, b"after").last_seq
        assert client.read(TOPIC, seq - 1).bytes() == [b"after"]


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_an_asyncio_client_refuses_values_that_no_parameter_accepts(engine: Any, transport: Any) -> None:
    async def main() -> None:
        async with ringlog.aio.connect(engine.url, transport=transport, wait=10) as client:
            assert await try_all_in_loop(client) == []
            seq = (await client.append(TOPIC, b"after")).last_seq
            assert (await client.read(TOPIC, seq - 1)).bytes() == [b"after"]

    asyncio.run(main())


@pytest.mark.parametrize(("holder", "make"), [
    ("tailer", lambda client: client.tailer(TOPIC)),
    ("ticket", lambda client: client.producer(TOPIC, linger_ms=0).send(b"sent")),
    ("job", lambda client: client.queue(QUEUE).claim(wait_ms=10_000)[0]),
])  # fmt: skip
def test_objects_made_by_a_client_refuse_values_that_no_parameter_accepts(
    engine: Any, holder: str, make: Callable[[Any], Any]
) -> None:
    with ringlog.connect(engine.url, transport="ring", wait=10) as client:
        client.append(QUEUE, b"job")
        assert try_one(holder, make(client)) == []


@pytest.mark.parametrize("connect", [ringlog.connect, ringlog.aio.connect])
@pytest.mark.parametrize(
    "given",
    [
        {"url": 5}, {"client_id": "\ud800"}, {"client_id": 5}, {"timeout_ms": 2.5}, {"timeout_ms": 1e999},
        {"timeout_ms": True}, {"wait": "5"}, {"wait": NAN}, {"wait": -1}, {"reconnect": "no"},
        {"transport": ["ring"]}, {"transport": 5},
        {"key": 5, "url": "ringlog://host:1?server_key=" + "a" * 40},
    ],
)  # fmt: skip
def test_invalid_connection_options_are_refused(connect: Any, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        connect(**{"url": "ringlog:///nowhere"} | given)


@pytest.mark.parametrize("text", [5, None, "1:\ud800", "\u0661:2", "1:" + "9" * 5_000, "1", ":", "1:-2"])
def test_what_is_no_cursor_is_refused(text: Any) -> None:
    with pytest.raises(UsageError):
        Cursor.parse(text)


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_bad_arguments_are_refused_without_an_engine(tmp_path: Any, transport: Any) -> None:
    with ringlog.connect(f"ringlog://{tmp_path}", transport=transport) as client:
        for call in (
            lambda: client.append("\ud800", b""),
            lambda: client.append([TOPIC], b""),  # type: ignore[arg-type]
            lambda: client.append(TOPIC, b"", create="no"),  # type: ignore[arg-type]
            lambda: client.append_many(TOPIC, 5),  # type: ignore[arg-type]
            lambda: client.read(5),  # type: ignore[arg-type]
            lambda: client.read(TOPIC, Cursor(0, -5)),
            lambda: client.read(TOPIC, limit=2.5),  # type: ignore[arg-type]
            lambda: client.reader(TOPIC, Cursor(1, -1)),
            lambda: client.producer(TOPIC, payload=5),  # type: ignore[call-overload]
            lambda: client.topics.state("\ud800"),
            lambda: client.routers.delete("\ud800"),
        ):
            with pytest.raises(UsageError):
                call()


def test_a_refusal_names_the_parameter_and_the_accepted_values(engine: Any) -> None:
    with ringlog.connect(engine.url, wait=10) as client:
        with pytest.raises(UsageError, match="wait_ms must be >= 0, got -5"):
            client.read(TOPIC, wait_ms=-5)
        with pytest.raises(UsageError, match=r"after.seq must be >= 0, got -5"):
            client.read(TOPIC, Cursor(0, -5))
        with pytest.raises(UsageError, match="follow must be True or False, got 'no'"):
            client.reader(TOPIC, follow="no")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="topic must be text that UTF-8 can hold"):
            client.append("\ud800", b"")


def test_a_job_error_with_a_lone_surrogate_returns_the_job(engine: Any) -> None:
    with ringlog.connect(engine.url, wait=10) as client:
        client.topics.create("bad-arguments.surrogates", type="queue")
        queue = client.queue("bad-arguments.surrogates")
        queue.put(b"job")
        with pytest.raises(ValueError, match="the job's own"), queue.claim()[0]:
            raise ValueError("the job's own \ud800")
        (job,) = queue.claim(wait_ms=10_000)
        assert job.deliveries == 2
        job.nack(reason="\ud800")


def test_text_must_be_encodable_as_utf8() -> None:
    assert utf8("é", "name") == b"\xc3\xa9"
    with pytest.raises(UsageError, match="name must be text that UTF-8 can hold, got a lone surrogate"):
        utf8("ab\ud800", "name")
