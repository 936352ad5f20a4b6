"""Which listeners a start accepts: endpoints, CURVE keys and client keys."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from ringlog.config import Config
from ringlog.config_sources import load_config
from ringlog.errors import ConfigError
from ringlog.supervision.endpoints import (
    check_listeners,
    http_url,
    keep_http_port,
    public_key_of,
    resolve,
)
from tests.support.certificates import self_signed


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


# -- the HTTP gateway --------------------------------------------------------------------------------


def http_config(tmp_path: Path, **given: object) -> Config:
    """Settings with the HTTP gateway. `auth_…` are settings of section auth."""
    flags = {"http.enabled": "true", "http.port": "0"}
    for key, value in given.items():
        section, name = ("auth", key.removeprefix("auth_")) if key.startswith("auth_") else ("http", key)
        flags[f"{section}.{name}"] = str(value)
    return load_config(flags, {}, str(tmp_path)).config


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_http_on_loopback_needs_no_keys_and_is_pinned(tmp_path: Path, host: str) -> None:
    with keep_http_port(check_listeners(http_config(tmp_path, host=host), {})) as pinned:
        http = pinned.http
    assert http.host in {"127.0.0.1", "::1"}
    assert http.port > 0
    name = "[::1]" if ":" in http.host else http.host
    assert http_url(http) == f"http://{name}:{http.port}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_http_elsewhere_needs_keys_or_allow_insecure(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys_file, RINGLOG_API_KEYS"):
        check_listeners(http_config(tmp_path, host=host), {})
    assert check_listeners(http_config(tmp_path, host=host), {"RINGLOG_API_KEYS": "k"}).http.host != "*"
    insecure = check_listeners(http_config(tmp_path, host=host, auth_allow_insecure=True), {})
    assert http_url(insecure.http).startswith(("http://127.0.0.1:", "http://[::1]:"))
    (tmp_path / "keys").touch(0o600)
    check_listeners(http_config(tmp_path, host=host, auth_keys_file=tmp_path / "keys"), {})


def test_http_keys_must_be_private(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_listeners(http_config(tmp_path, auth_keys_file=tmp_path / "keys"), {})


def test_http_needs_a_host_with_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http\.host: has no address"):
        check_listeners(http_config(tmp_path, host="no.such.invalid"), {})


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        given = check_listeners(http_config(tmp_path, port=port), {})
        with (
            pytest.raises(ConfigError, match=f"port {port}: stop what listens there") as caught,
            keep_http_port(given),
        ):
            pass
    assert "\n" not in str(caught.value)
    with keep_http_port(given) as kept:
        assert kept.http.port == port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_the_port_is_kept_for_the_gateways_of_one_engine(tmp_path: Path, host: str) -> None:
    """Also while none of them listens. They share it with each other only."""
    keyed = {"RINGLOG_API_KEYS": "k"}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with keep_http_port(check_listeners(http_config(tmp_path, host=host), keyed)) as kept:
        http = kept.http
        refusal = f"port {http.port}: stop what listens there"
        # A check of the settings neither needs the port nor disturbs the engine that has it.
        assert check_listeners(kept, keyed) == kept
        with pytest.raises(ConfigError, match=refusal), keep_http_port(kept):
            pass
        for _ in range(2):  # A gateway, and its successor.
            with socket.socket(family) as first, socket.socket(family) as second:
                for each in (first, second):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    each.bind((http.host, http.port))
                    each.listen()
                with pytest.raises(ConfigError, match=refusal), keep_http_port(kept):
                    pass
    with keep_http_port(kept) as again:
        assert again.http.port == http.port


def test_no_port_is_kept_without_gateways(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        given = http_config(tmp_path, enabled="false", port=port)
        with keep_http_port(given) as kept:
            assert kept is given


def test_http_without_its_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringlog.supervision.endpoints._HTTP_PACKAGES", ("granian", "no_such_package"))
    with pytest.raises(ConfigError, match=r"pip install 'ringlog\[http\]'") as caught:
        check_listeners(http_config(tmp_path), {})
    assert caught.value.detail["missing"] == ["no_such_package"]
    given = config(tmp_path, "ipc")
    assert check_listeners(given) is given


@pytest.mark.slow
def test_tls_files_are_a_certificate_with_its_private_key(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    both = {"tls_cert_file": cert, "tls_key_file": key}
    assert http_url(check_listeners(http_config(tmp_path, **both), {}).http).startswith("https://127.0.0.1:")
    with pytest.raises(ConfigError, match=r"http\.tls_cert_file is set without http\.tls_key_file"):
        check_listeners(http_config(tmp_path, tls_cert_file=cert), {})
    with pytest.raises(ConfigError, match=r"http\.tls_key_file is set without http\.tls_cert_file"):
        check_listeners(http_config(tmp_path, tls_key_file=key), {})
    with pytest.raises(ConfigError, match=r"http\.tls_cert_file: cannot be read"):
        check_listeners(http_config(tmp_path, **both | {"tls_cert_file": tmp_path / "none"}), {})
    with pytest.raises(ConfigError, match="not a certificate"):
        check_listeners(http_config(tmp_path, **both | {"tls_cert_file": key}), {})
    public = tmp_path / "public.pem"
    public.write_bytes(key.read_bytes())
    public.chmod(0o644)
    with pytest.raises(ConfigError, match=r"http\.tls_key_file must belong"):
        check_listeners(http_config(tmp_path, **both | {"tls_key_file": public}), {})


@pytest.mark.slow
def test_an_encrypted_key_is_refused_without_a_question(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    locked.chmod(0o600)
    with pytest.raises(ConfigError, match="unencrypted key"):
        check_listeners(http_config(tmp_path, tls_cert_file=cert, tls_key_file=locked), {})


def test_a_wildcard_resolves_to_nothing() -> None:
    assert resolve("*") == []
    assert resolve("127.0.0.1") == ["127.0.0.1"]
