"""Decide whether the engine may listen on an endpoint. All resolved addresses are checked, also IPv6."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
import tomllib

import msgspec

from ringlog.config import Config
from ringlog.errors import ConfigError

IPC = "ipc"
_TCP = re.compile(r"^tcp://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]/]+)):(?P<port>[0-9]{1,5})$")
PORT_MAX = 65_535


def check_listeners(config: Config) -> Config:
    """Refuse an endpoint that would admit uninvited clients. Returns the config with resolved host names.

    Raises ConfigError, which names the key and what is missing. Wildcard addresses and names that do not
    resolve count as reachable from other hosts.
    """
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
