"""URLs, and the file by which clients find a local engine."""

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
def test_any_server_key_can_be_given_plain_or_percent_encoded(key):
    """Z85 contains characters such as & # % + ? that have a meaning in a URL."""
    for spelling in (key, quote(key, safe="")):
        address = parse_url(f"ringlog://host:4100?server_key={spelling}")
        assert (address.server_key, address.endpoint) == (key, "tcp://host:4100")


def test_the_default_url_comes_from_the_environment(monkeypatch):
    """Without `RINGLOG_URL` it is the run directory of `ringlog-data`."""
    monkeypatch.setenv("RINGLOG_URL", "ringlog:///from/environment")
    assert parse_url(None).run_dir == "/from/environment"
    monkeypatch.delenv("RINGLOG_URL")
    assert parse_url(None).run_dir.endswith("/ringlog-data/run")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://x", "must start with ringlog://"),
        ("ringlog:relative", "absolute"),
        ("ringlog://host", "name host and port"),
        ("ringlog://host:99999", "port of a url must be"),
        ("ringlog://host:1?colour=red", "unknown option"),
        ("ringlog://host:1?server_key=short", "40 characters"),
        ("ringlog://[", "url is not valid"),
        ("ringlog://[x]:1?server_key=short", "url is not valid"),
        ("ringlog://h\u2100:1", "url is not valid"),
    ],
)
def test_a_wrong_url_is_a_usage_error_with_a_reason(url, said):
    with pytest.raises(UsageError, match=said):
        parse_url(url)


def test_the_engine_is_found_from_its_run_or_data_directory(tmp_path):
    info = EngineInfo("e", "s", "/dev/shm/x", "/data", 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engine.json").write_bytes(msgspec.json.encode(info))
    assert read_engine_file(str(tmp_path / "run")) == info
    assert read_engine_file(str(tmp_path)) == info
    assert read_engine_file(str(tmp_path / "elsewhere")) is None


def test_an_unreadable_engine_file_is_a_usage_error(tmp_path):
    (tmp_path / "engine.json").write_text("{")
    with pytest.raises(UsageError, match="not valid"):
        read_engine_file(str(tmp_path))


def test_an_unreadable_run_directory_is_read_again(tmp_path):
    """If the device of the run directory fails and recovers (RF-50), the watch continues."""
    clock, timers, found = ManualClock(), Timers(), []
    watch = EngineWatch(
        str(tmp_path), clock=clock, timers=timers, on_engine=found.append, on_mismatch=found.append
    )
    in_the_way = tmp_path / "engine.json"
    in_the_way.mkdir()  # A directory causes a read error that is not FileNotFoundError.
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
def test_a_malformed_engine_file_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    """Fuzzing found the contents that are not UTF-8."""
    (tmp_path / "engine.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"engine\.json is not valid"):
        read_engine_file(str(tmp_path))
