"""Which listeners a start accepts: endpoints, CURVE keys and client keys."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ringlog.config import Config, load_config
from ringlog.errors import ConfigError
from ringlog.supervision.endpoints import check_listeners, public_key_of, resolve


def config(
    tmp_path: Path, endpoint: str, *, curve: bool = False, keys: bool = False, insecure: bool = False
) -> Config:
    flags = {"native.endpoint": endpoint, "auth.allow_insecure": str(insecure)}
    for wanted, key, name in ((curve, "native.curve_key_file", "curve"), (keys, "auth.keys_file", "keys")):
        if wanted:
            (tmp_path / name).write_text('public_key = "k"\n')
            (tmp_path / name).chmod(0o600)
            flags[key] = str(tmp_path / name)
    return load_config(flags, {}, str(tmp_path)).config


LOOPBACK = ["tcp://127.0.0.1:5555", "tcp://127.8.9.1:5555", "tcp://[::1]:5555", "tcp://localhost:5555"]
OPEN = [
    "tcp://0.0.0.0:5555",
    "tcp://*:5555",
    "tcp://[::]:5555",
    "tcp://192.0.2.1:5555",
    "tcp://no.such.invalid:5555",
]


@pytest.fixture(autouse=True)
def name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve names without the network, so that the tests do not depend on the host's resolver."""
    real = socket.getaddrinfo

    def lookup(host, *args, **kwargs):
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        if host == "both.example":
            return [*real("127.0.0.1", *args, **kwargs), *real("192.0.2.9", *args, **kwargs)]
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


def test_ipc_needs_no_keys(tmp_path: Path) -> None:
    given = config(tmp_path, "ipc")
    assert check_listeners(given) is given


@pytest.mark.parametrize("endpoint", LOOPBACK + OPEN)
def test_plain_tcp_is_refused_everywhere(tmp_path: Path, endpoint: str) -> None:
    """TCP without a CURVE key is refused on every address."""
    with pytest.raises(ConfigError, match=r"native\.curve_key_file"):
        check_listeners(config(tmp_path, endpoint, keys=True, insecure=True))


@pytest.mark.parametrize("endpoint", LOOPBACK)
def test_loopback_with_a_curve_key_needs_no_client_keys(tmp_path: Path, endpoint: str) -> None:
    assert check_listeners(config(tmp_path, endpoint, curve=True)).native.endpoint.startswith("tcp://")


@pytest.mark.parametrize("endpoint", [*OPEN, "tcp://both.example:5555"])
def test_other_addresses_need_client_keys_or_allow_insecure(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys_file"):
        check_listeners(config(tmp_path, endpoint, curve=True))
    check_listeners(config(tmp_path, endpoint, curve=True, keys=True))
    check_listeners(config(tmp_path, endpoint, curve=True, insecure=True))


def test_the_checked_address_is_the_one_that_is_bound(tmp_path: Path) -> None:
    checked = check_listeners(config(tmp_path, "tcp://localhost:5555", curve=True))
    assert checked.native.endpoint in {"tcp://127.0.0.1:5555", "tcp://[::1]:5555"}


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://127.0.0.1:0",
        "tcp://h:65536",
        "http://a:1",
        "inproc://x",
        "tcp://::1:5",
    ],
)
def test_an_invalid_endpoint_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"native\.endpoint"):
        check_listeners(config(tmp_path, endpoint, curve=True))


def test_key_files_must_be_private_and_present(tmp_path: Path) -> None:
    """A key file must be a regular file with mode 0600."""
    given = config(tmp_path, "tcp://127.0.0.1:5555", curve=True)
    os.chmod(tmp_path / "curve", 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_listeners(given)
    os.unlink(tmp_path / "curve")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_listeners(given)
    (tmp_path / "curve").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="regular file"):
        check_listeners(given)


def test_public_key_of_returns_the_public_key_and_hides_the_file(tmp_path: Path) -> None:
    config(tmp_path, "ipc", curve=True)
    assert public_key_of(str(tmp_path / "curve")) == "k"
    (tmp_path / "curve").write_text("secret_key = oops")
    with pytest.raises(ConfigError, match="not a key file") as caught:
        public_key_of(str(tmp_path / "curve"))
    assert "oops" not in str(caught.value)


def test_a_wildcard_resolves_to_nothing() -> None:
    assert resolve("*") == []
    assert resolve("127.0.0.1") == ["127.0.0.1"]
