"""A client works among green threads, or `connect()` fails at once and names a remedy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import ringlog
from ringlog.client import ClientState
from ringlog.errors import UsageError
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic

__all__ = ["ringlog_engine", "ringlog_topic"]
ROOT = Path(__file__).parent.parent.parent

USE = """
import os, sys, ringlog
url, topic, transport = sys.argv[1:4]
client = ringlog.connect(url, wait=10, transport=transport)
queue = client.queue(f"{topic}-q")
assert client.append(topic, b"x").count == 1
client.topics.create(f"{topic}-q", type="queue", exist_ok=True)
"""

WORK = """
claimed = spawn(lambda: queue.claim(wait_ms=20_000))  # It must not keep the others from running.
appends = [spawn(lambda: [client.append(topic, b"y") for _ in range(20)]) for _ in range(5)]
out = client.producer(topic)
ticket = out.send(b"z")  # Goes out and settles by the client's own thread.
while not ticket.done():
    sleep(0.01)
queue.put(b"job")
[job] = value(claimed)
job.ack()
assert sum(len(value(each)) for each in appends) == 100
watch = client.watch(topic)
assert watch.next(10).records
try:
    with Timeout(0.2):
        queue.claim(wait_ms=20_000)
except Timeout:
    assert client.append(topic, b"after").count == 1
"""

FORK = """
waits = spawn(lambda: queue.claim(wait_ms=2_000))
sleep(0.1)
pid = os.fork()
assert sum(client.append(topic, b"p").count for _ in range(20)) == 20
if not pid:
    try:
        value(waits)
    except ringlog.errors.Interrupted as e:  # The parent's call goes on in the parent alone.
        assert e.detail["by"] == "fork", e
        assert queue.claim(wait_ms=1) == []
        client.close()
        os._exit(7)
    os._exit(8)
assert value(waits) == []
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""

END = """
report = client.close()
assert report == type(report)(0, 0, 0), report
print("good")
"""

GEVENT = """
import gevent
from gevent import monkey; monkey.patch_all()
from gevent import Timeout, sleep, spawn
def value(greenlet):
    greenlet.join()
    if greenlet.exception: raise greenlet.exception
    return greenlet.value
"""

EVENTLET = """
import eventlet, eventlet.debug
eventlet.monkey_patch()
eventlet.debug.hub_prevent_multiple_readers(False)
from eventlet import Timeout, sleep, spawn
def value(thread): return thread.wait()
"""


def run(program: str, *arguments: str) -> str:
    """Run the program and return the last line of its output, from either stream."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments], check=False, text=True, timeout=50,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return ended.stdout.strip().rpartition("\n")[2]


def require(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("then", [WORK, FORK], ids=["work", "fork"])
def test_a_fully_patched_gevent_works(ringlog_engine, ringlog_topic, transport, then):
    require("gevent")
    assert run(GEVENT + USE + then + END, ringlog_engine.url, ringlog_topic(), transport) == "good"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_eventlet_works_if_threads_may_share_descriptors(ringlog_engine, ringlog_topic, transport):
    require("eventlet")
    assert run(EVENTLET + USE + WORK + END, ringlog_engine.url, ringlog_topic(), transport) == "good"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("left_out", ["thread", "select"])
def test_a_partially_patched_gevent_is_refused(ringlog_engine, ringlog_topic, left_out):
    """Without the refusal the client's thread dies and no ticket settles, or it blocks all green threads."""
    require("gevent")
    patch = f"from gevent import monkey; monkey.patch_all({left_out}=False)\n"
    said = run(patch + USE, ringlog_engine.url, ringlog_topic(), "auto")
    assert said.startswith("ringlog.errors.UsageError: gevent patched")
    assert f"not `{left_out}`" in said


@pytest.mark.timeout(60)
def test_a_client_created_before_the_patch_is_refused(ringlog_engine, ringlog_topic):
    """Without the refusal two green threads take its lock at once: `cannot release un-acquired lock`."""
    require("gevent")
    late = """
try:
    client.append(topic, b"late")
except ringlog.errors.UsageError as e:
    assert "threads were monkey-patched after" in str(e)
    client.close()
    print("good", flush=True)
    os._exit(0)  # gevent complains at the end about threads that were there before it.
"""
    assert run(USE + GEVENT + late, ringlog_engine.url, ringlog_topic(), "auto") == "good"


class Monkey(types.ModuleType):
    """A fake of `gevent.monkey` and `eventlet.patcher` with the functions that the client calls."""

    def __init__(self, name: str, *patched: str) -> None:
        super().__init__(name)
        self.is_module_patched = self.is_monkey_patched = patched.__contains__


@pytest.mark.parametrize(
    "monkey",
    [
        Monkey("gevent.monkey", "threading"),
        Monkey("gevent.monkey", "select"),
        Monkey("eventlet.patcher", "thread"),
        Monkey("eventlet.patcher", "select"),
        Monkey("eventlet.patcher", "thread", "select"),
    ],
    ids=lambda monkey: monkey.__name__,
)
def test_an_unusable_patch_is_refused_before_connect_creates_anything(monkeypatch, monkey):
    monkeypatch.setitem(sys.modules, monkey.__name__, monkey)
    before = threading.active_count()
    with pytest.raises(UsageError, match=r"gevent patched|eventlet patched|eventlet allows"):
        ringlog.connect("ringlog:///nowhere")
    assert threading.active_count() == before


@pytest.mark.parametrize("patched", [(), ("threading", "select")])
def test_threads_and_select_are_accepted_if_both_or_neither_are_patched(monkeypatch, patched):
    monkeypatch.setitem(sys.modules, "gevent.monkey", Monkey("gevent.monkey", *patched))
    with ringlog.connect("ringlog:///nowhere") as client:
        assert client.state is ClientState.CONNECTING


def test_a_client_with_replaced_threads_can_be_closed(monkeypatch):
    """Its first call fails with a remedy. `close()` and the end of the process do not wait for its locks."""
    client = ringlog.connect("ringlog:///nowhere")
    monkeypatch.setattr(threading, "get_ident", lambda: 0)
    with pytest.raises(UsageError, match="in each worker"):
        client.append("orders", b"x")
    client.close()
    client.close()
