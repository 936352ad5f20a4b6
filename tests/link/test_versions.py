"""A client and an engine of different protocol versions report this in one sentence, whichever is older."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq

import ringlog
from ringlog.board.processes import socket_of
from ringlog.envelope.engine_file import ENGINE_FILE, EngineInfo
from ringlog.envelope.wire import PROTOCOL, EnvelopeInvalid, decode
from ringlog.errors import Status, VersionMismatch
from ringlog.link.address import read_engine_file
from ringlog.testing.real_engine import engine

_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode
WAIT_S = 20.0


@pytest.mark.parametrize("other", [0, PROTOCOL - 1, PROTOCOL + 1, 1 << 40])
def test_an_envelope_of_another_version_is_refused_with_its_version_and_id(other: int) -> None:
    with pytest.raises(EnvelopeInvalid, match=f"protocol versions, {other} and {PROTOCOL}:") as caught:
        decode(_pack([other, "AnyKind", 7, []]))
    assert (caught.value.corr, caught.value.version) == (7, other)
    with pytest.raises(EnvelopeInvalid) as caught:
        decode(_pack([PROTOCOL, "AnyKind", 7, []]))
    assert (caught.value.corr, caught.value.version) == (7, 0)


def test_a_local_client_checks_the_version_before_it_connects(tmp_path: Path) -> None:
    info = EngineInfo("e" * 32, "s", str(tmp_path), str(tmp_path), 1, protocol=PROTOCOL - 1, version="0.0.9")
    (tmp_path / ENGINE_FILE).write_bytes(msgspec.json.encode(info))
    with pytest.raises(VersionMismatch, match=f"protocol versions, {PROTOCOL - 1} and {PROTOCOL}:") as caught:
        ringlog.connect(f"ringlog://{tmp_path}", wait=WAIT_S)
    assert caught.value.detail["engine"] == "0.0.9"


@pytest.mark.slow
def test_an_older_client_gets_the_error_in_its_own_version() -> None:
    with engine(gateway={"enabled": True}) as running:
        found = read_engine_file(running.run_dir)
        assert found is not None
        assert found.protocol == PROTOCOL
        supervisor, shard = (socket_of(found.shm_dir, name) for name in ("supervisor", "wal_shard-00"))
        with zmq.Context() as context:
            for endpoint in (supervisor, shard, found.gateway_ipc):
                with context.socket(zmq.DEALER) as socket:
                    socket.linger = 0
                    socket.connect(endpoint)
                    socket.send(_pack([PROTOCOL - 1, "Ping", 9, []]))
                    assert socket.poll(1_000 * WAIT_S), endpoint
                    version, kind, corr, body = _unpack(socket.recv())
                assert (version, kind, corr) == (PROTOCOL - 1, "ErrorReply", 9)
                assert body[0] == int(Status.INVALID_REQUEST)
                assert body[1].endswith(
                    f"{PROTOCOL - 1} and {PROTOCOL}: install the same ringlog release on both"
                )
