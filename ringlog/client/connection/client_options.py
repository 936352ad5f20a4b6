"""Options of `connect`, checked, with defaults from environment variables."""

from __future__ import annotations

import os
from typing import Any, Literal

from ringlog import environment
from ringlog.client.requests.validation import check_int, check_str
from ringlog.errors import ConfigError, UsageError
from ringlog.link.address import Address, parse_url
from ringlog.link.curve import is_public_key, read_key_file
from ringlog.link.protocol import Transport
from ringlog.shm import unsupported_host_reason

TIMEOUT_MS_DEFAULT = 10_000
TIMEOUT_MS_MAX = 3_600_000


class ClientOptions:
    """Checked options of `connect`, with defaults from environment variables. Raises UsageError."""

    def __init__(
        self, url: str | None, client_id: str | None, key: str | None, timeout_ms: int | None, transport: str
    ) -> None:
        self.address: Address = parse_url(url)
        self.client_id: str | None = None if client_id is None else check_str(client_id, "client_id")
        self.secret_key: str = "" if self.address.is_local else _secret_key(key)
        self.timeout_ms: int = _timeout_ms(timeout_ms)
        self.transport: Transport | Literal["auto"] = _transport(self.address, transport)


def _transport(address: Address, transport: str) -> Transport | Literal["auto"]:
    if check_str(transport, "transport") not in {"auto", "ring", "ipc", "tcp"}:
        raise UsageError(f"transport must be auto, ring, ipc or tcp, got {transport[:64]!r}", found=transport)
    if address.is_local:
        reason = unsupported_host_reason()
        if reason:
            raise UsageError(reason, address=str(address))
        if transport == "tcp":
            raise UsageError("transport tcp needs a url ringlog://host:port", address=str(address))
        return transport  # type: ignore[return-value]
    if transport not in {"auto", "tcp"}:
        raise UsageError(
            f"transport {transport} needs the url of a run directory on this host", address=str(address)
        )
    return "tcp"


def _secret_key(key: str | None) -> str:
    """Return the secret key of a TCP connection: from the call, the key file, or the variable; "" = none.

    Raises UsageError, which never contains the key.
    """
    source, path = "key", os.environ.get(environment.KEY_FILE)
    if key is None and path:
        try:
            return read_key_file(path, needs_secret=True).secret.decode()
        except ConfigError as e:
            raise UsageError(f"{environment.KEY_FILE}: {e.message}", **e.detail) from None
    if key is None:
        source, key = environment.KEY, os.environ.get(environment.KEY, "")
    if key and not is_public_key(key):
        found = f"{len(key)} characters" if isinstance(key, str) else type(key).__name__
        raise UsageError(f"{source} must be 40 characters of Z85, the secret_key of a key file, got {found}")
    return key


def _timeout_ms(asked: int | None) -> int:
    found: Any = asked if asked is not None else os.environ.get(environment.TIMEOUT_MS, TIMEOUT_MS_DEFAULT)
    try:
        value = check_int(asked, "timeout_ms") if asked is not None else int(found)
    except (TypeError, ValueError):
        raise UsageError(
            f"timeout_ms must be a number of milliseconds, got {repr(found)[:64]}", found=found
        ) from None
    if not 1 <= value <= TIMEOUT_MS_MAX:
        raise UsageError(
            f"timeout_ms must be from 1 to {TIMEOUT_MS_MAX}, got {str(value)[:32]}", found=value, min=1,
            max=TIMEOUT_MS_MAX,
        )  # fmt: skip
    return value
