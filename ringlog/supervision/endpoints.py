"""Decide whether the engine may listen on an endpoint. All resolved addresses are checked, also IPv6."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import msgspec

from ringlog.config import Config, HttpConfig
from ringlog.environment import API_KEYS
from ringlog.errors import ConfigError

IPC = "ipc"
_TCP = re.compile(r"^tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]/]+)):(?P<port>[0-9]{1,5})$")
PORT_MAX = 65_535
_HTTP_PACKAGES = ("granian", "uvloop")
_HTTP_EVERY_ADDRESS = "0.0.0.0"


def check_listeners(config: Config, environ: Mapping[str, str] | None = None) -> Config:
    """Refuse an endpoint that would admit uninvited clients. Returns the config with resolved host names.

    Settings are checked, not whether a port is free: the engine that runs with them holds its ports.

    Raises ConfigError, which names the key and what is missing. Wildcard addresses and names that do not
    resolve count as reachable from other hosts. `environ` has RINGLOG_API_KEYS; None: that of this process.
    """
    if config.http.enabled:
        config = _check_http(config, os.environ if environ is None else environ)
    endpoint = config.native.endpoint
    if endpoint == IPC:
        return config
    host, port = _parse(endpoint)
    if not config.native.curve_key_file:
        raise ConfigError(
            "native.endpoint is TCP and needs native.curve_key_file: unencrypted TCP is not supported",
            found=endpoint,
        )
    _require_private_file("native.curve_key_file", config.native.curve_key_file)
    if config.auth.keys_file:
        _require_private_file("auth.keys_file", config.auth.keys_file)
    addresses = resolve(host)
    if not (config.auth.keys_file or config.auth.allow_insecure or _are_loopback(addresses)):
        raise ConfigError(
            "native.endpoint: without auth.keys_file only loopback addresses are served; "
            "auth.allow_insecure serves everybody",
            found=endpoint,
            resolved=addresses or "nothing",
        )
    if not addresses:
        return config
    # Bind the address that was checked. The name may resolve to another address a second later.
    pinned = f"tcp://[{addresses[0]}]:{port}" if ":" in addresses[0] else f"tcp://{addresses[0]}:{port}"
    native = msgspec.structs.replace(config.native, endpoint=pinned)
    return msgspec.structs.replace(config, native=native)


def check_api_keys(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if RINGLOG_API_KEYS is invalid. The error contains no key."""
    if environ.get(API_KEYS):
        from ringlog.access.key_sources import parse_api_keys  # Only for engines with bearer keys.

        parse_api_keys(environ[API_KEYS])


def _check_http(config: Config, environ: Mapping[str, str]) -> Config:
    """Refuse an HTTP gateway that could not start, or would admit uninvited clients. Pins the host."""
    http = config.http
    missing = [name for name in _HTTP_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "http.enabled needs packages that are not installed; run: pip install 'ringlog[http]'",
            missing=missing,
        )
    host = _HTTP_EVERY_ADDRESS if http.host == "*" else http.host
    addresses = resolve(host)
    if not addresses:
        raise ConfigError("http.host: has no address", found=http.host)
    has_keys = bool(config.auth.keys_file or environ.get(API_KEYS))
    if not (has_keys or config.auth.allow_insecure or _are_loopback(addresses)):
        raise ConfigError(
            "http.host: only loopback addresses are served without keys (auth.keys_file, RINGLOG_API_KEYS); "
            "auth.allow_insecure serves everybody",
            found=http.host, resolved=addresses,
        )  # fmt: skip
    if config.auth.keys_file:
        _require_private_file("auth.keys_file", config.auth.keys_file)
    _check_tls(http)
    # Bind the address that was checked.
    return msgspec.structs.replace(config, http=msgspec.structs.replace(http, host=addresses[0]))


def http_url(http: HttpConfig) -> str:
    """Return the address of the HTTP gateway for clients on this host, such as `http://127.0.0.1:4000`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(http.host, http.host)
    scheme = "https" if http.tls_cert_file else "http"
    return f"{scheme}://[{host}]:{http.port}" if ":" in host else f"{scheme}://{host}:{http.port}"


def _check_tls(http: HttpConfig) -> None:
    """Refuse TLS files that are incomplete, readable by others, or no certificate with its key."""
    if not (http.tls_cert_file or http.tls_key_file):
        return
    if not (http.tls_cert_file and http.tls_key_file):
        given, other = ("cert", "key") if http.tls_cert_file else ("key", "cert")
        raise ConfigError(f"http.tls_{given}_file is set without http.tls_{other}_file: TLS needs both")
    import ssl  # Loads OpenSSL: only for engines with TLS.

    try:
        open(http.tls_cert_file, "rb").close()
    except OSError as e:
        raise ConfigError(
            "http.tls_cert_file: cannot be read", file=http.tls_cert_file, reason=e.strerror
        ) from None
    _require_private_file("http.tls_key_file", http.tls_key_file)
    try:
        # An encrypted key would ask for its password at a terminal: an empty one makes it an error.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            http.tls_cert_file, http.tls_key_file, password=""
        )
    except (ssl.SSLError, ValueError, OSError) as e:
        raise ConfigError(
            "http.tls_cert_file and http.tls_key_file: not a certificate (PEM) with its unencrypted key",
            file=http.tls_cert_file, reason=str(e),
        ) from None  # fmt: skip


@contextlib.contextmanager
def keep_http_port(config: Config) -> Iterator[Config]:
    """Keep the port for the HTTP gateways of this engine during the block. Without them it is not bound.

    Yields the config with the kept port, a free one for 0, so that a restarted gateway gets the same.

    The gateways share the port (SO_REUSEPORT), which the kernel allows to all processes of the user. A socket
    that is bound alone, and shares its port only afterwards, keeps it from other engines and programs, also
    while no gateway listens. It never listens itself.

    Raises ConfigError if the port is in use.
    """
    http = config.http
    if not http.enabled:
        yield config
        return
    with _bound(http.host, http.port) as keeper:
        # Without SO_REUSEADDR: two sockets with it may have one port until one of them listens.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = int(keeper.getsockname()[1])
        yield msgspec.structs.replace(config, http=msgspec.structs.replace(http, port=port))


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket that alone is bound to a port. Raises ConfigError if the port is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except OSError as e:
        bound.close()
        hint = ": stop what listens there, or choose another http.port" if e.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"http.port: cannot listen on {address} port {port}{hint}", reason=e.strerror
        ) from None
    return bound


def resolve(host: str) -> list[str]:
    """Return the numeric addresses of a host, IPv4 first. Empty if none is found (`*`, an interface)."""
    if host == "*":
        return []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = {str(info[4][0]) for info in found}
    return sorted(addresses, key=lambda text: (":" in text, text))


def _are_loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(text.split("%")[0]).is_loopback for text in addresses)


def _parse(endpoint: str) -> tuple[str, int]:
    match = _TCP.match(endpoint)
    if match is None:
        raise ConfigError("native.endpoint: must be ipc or tcp://host:port", found=endpoint)
    port = int(match["port"])
    if not 1 <= port <= PORT_MAX:
        raise ConfigError("native.endpoint: port out of range", found=port, min=1, max=PORT_MAX)
    return match["v6"] or match["host"], port


def _require_private_file(key: str, path: str) -> None:
    try:
        facts = os.stat(path)
    except OSError as e:
        raise ConfigError(f"{key}: cannot be read", file=path, reason=e.strerror) from None
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{key}: not a regular file", file=path)
    if facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
        raise ConfigError(
            f"{key} must belong to the user of the engine and have mode 0600; run: chmod 600 {path}",
            file=path,
            mode=oct(facts.st_mode & 0o777),
        )


def public_key_of(curve_key_file: str) -> str:
    """Return the public half of the server's CURVE key, which clients on this host verify.

    Returns "" if the file has none. Raises ConfigError if the file is not a key file.
    """
    try:
        with open(curve_key_file, "rb") as file:
            return str(tomllib.load(file).get("public_key", ""))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError("native.curve_key_file: not a key file", file=curve_key_file) from None
