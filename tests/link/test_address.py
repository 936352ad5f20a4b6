"""URLs and the file an engine leaves (CL-1)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
import zmq.utils.z85
from hypothesis import given
from hypothesis import strategies as st

from ringlog.envelope.engine_file import EngineInfo
from ringlog.envelope.wire import PROTOCOL
from ringlog.errors import UsageError
from ringlog.link.address import parse_url, read_engine_file
from ringlog.link.engine_watch import EngineWatch
from ringlog.link.timers import Timers
from ringlog.testing.clock import ManualClock


def test_a_local_url_names_a_run_directory():
    assert parse_url("ringlog:///var/lib/ring%20log/run/").run_dir == "/var/lib/ring log/run"


def test_a_remote_url_names_an_endpoint_and_the_servers_key():
    address = parse_url(f"ringlog://example.org:4100?server_key={'k' * 40}")
    assert (address.endpoint, address.server_key, address.is_local) == (
        "tcp://example.org:4100",
        "k" * 40,
        False,
    )
    assert parse_url("ringlog://[::1]:5").endpoint == "tcp://[::1]:5"


@given(key=st.binary(min_size=32, max_size=32).map(lambda raw: zmq.utils.z85.encode(raw).decode()))
def test_any_server_key_may_be_pasted_as_printed_or_quoted(key):
    """Z85 uses & # % + ? and others that mean something in a URL."""
    for spelling in (key, quote(key, safe="")):
        address = parse_url(f"ringlog://host:4100?server_key={spelling}")
        assert (address.server_key, address.endpoint) == (key, "tcp://host:4100")


def test_without_a_url_the_environment_decides_then_the_default(monkeypatch):
    """CL-1."""
    monkeypatch.setenv("RINGLOG_URL", "ringlog:///from/environment")
    assert parse_url(None).run_dir == "/from/environment"
    monkeypatch.delenv("RINGLOG_URL")
    assert parse_url(None).run_dir.endswith("/ringlog-data/run")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://x", "not a ringlog URL"),
        ("ringlog:relative", "absolute"),
        ("ringlog://host", "names host and port"),
        ("ringlog://host:99999", "not a port"),
        ("ringlog://host:1?colour=red", "unknown option"),
        ("ringlog://host:1?server_key=short", "40 characters"),
        ("ringlog://[", "not a URL"),
        ("ringlog://[x]:1?server_key=short", "not a URL"),
        ("ringlog://h\u2100:1", "not a URL"),
    ],
)
def test_a_wrong_url_is_a_usage_error_that_says_what_is_wrong(url, said):
    with pytest.raises(UsageError, match=said):
        parse_url(url)


def test_the_engine_is_found_from_its_run_or_its_data_directory(tmp_path):
    info = EngineInfo("e", "s", "/dev/shm/x", "/data", 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engine.json").write_bytes(msgspec.json.encode(info))
    assert read_engine_file(str(tmp_path / "run")) == info
    assert read_engine_file(str(tmp_path)) == info
    assert read_engine_file(str(tmp_path / "elsewhere")) is None


def test_an_unreadable_engine_file_is_named(tmp_path):
    (tmp_path / "engine.json").write_text("{")
    with pytest.raises(UsageError, match="not readable"):
        read_engine_file(str(tmp_path))


def test_a_run_directory_that_cannot_be_read_for_a_while_is_looked_at_again(tmp_path):
    """RF-50: the device of the run directory fails, and comes back; the watch outlives that."""
    clock, timers, found = ManualClock(), Timers(), []
    watch = EngineWatch(
        str(tmp_path), clock=clock, timers=timers, on_engine=found.append, on_mismatch=found.append
    )
    in_the_way = tmp_path / "engine.json"
    in_the_way.mkdir()  # Any failure of the system that is no absence.
    with pytest.raises(UsageError, match="cannot be read"):
        read_engine_file(str(tmp_path))
    watch.start()
    in_the_way.rmdir()
    info = EngineInfo("e", "s", "/dev/shm/x", "/data", 2, PROTOCOL)
    in_the_way.write_bytes(msgspec.json.encode(info))
    clock.advance(1.0)
    timers.fire(clock.monotonic_ns())
    assert found == [info]


@pytest.mark.parametrize("content", [b"{", b'{"engine_id":"0\xa5\xa5"}', b"[" * 100_000, b"{}", b"\xff"])
def test_an_engine_file_that_is_none_is_a_typed_error(tmp_path: Path, content: bytes) -> None:
    """CL-1: whatever lies there; text that is not UTF-8 was found by fuzzing."""
    (tmp_path / "engine.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"engine\.json is not readable"):
        read_engine_file(str(tmp_path))
