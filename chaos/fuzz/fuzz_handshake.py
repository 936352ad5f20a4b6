"""Decoders of connection setup: URLs, engine.json, the engine's identity, ZAP requests, key files."""

from __future__ import annotations

import os
from collections.abc import Iterator

from chaos.fuzz.scratch import own_directory
from ringlog.access.key_ring import KeyRing, key_id
from ringlog.access.keys import Principal
from ringlog.access.permissions import SCOPES
from ringlog.actors.gateway.front_end.zap import TCP_DOMAIN, answer
from ringlog.errors import ConfigError, UsageError
from ringlog.link.address import parse_url, read_engine_file
from ringlog.link.curve import read_key_file
from ringlog.storage.identity_file import decode_identity, encode_identity

MAX_LEN = 512
SHARE = 1.5
RING = KeyRing([(key_id("x" * 40), Principal("x", SCOPES))])
URL, ZAP, IDENTITY, ENGINE, KEY = range(5)


def check(data: bytes) -> None:
    """Decode one input. Errors must be typed, and a ZAP request is admitted only with a listed key."""
    how, rest = (data[0] % 5, data[1:]) if data else (0, b"")
    match how:
        case 0:
            _url(rest.decode("utf-8", "replace"))
        case 1:
            _zap(rest.split(b"|"))
        case 2:
            _identity(rest)
        case _:
            _file(rest, is_engine=how == ENGINE)


def _url(text: str) -> None:
    try:
        address = parse_url(text)
        str(address)
    except UsageError:
        return
    if not address.is_local and not address.endpoint.startswith("tcp://"):
        raise AssertionError(f"{text!r} leads to {address.endpoint!r}")


def _zap(parts: list[bytes]) -> None:
    reply = answer(parts, RING)
    if reply is not None and reply[2] == b"200" and parts[5] != b"NULL":
        raise AssertionError(f"{parts!r} is admitted")


def _identity(data: bytes) -> None:
    try:
        found = decode_identity(data)
    except ValueError:
        return
    again = decode_identity(encode_identity(found.engine_id, found.next_incarnation, found.shm_dir))
    if again.next_incarnation != found.next_incarnation:
        raise AssertionError("an identity changes when it is written")


def _file(data: bytes, *, is_engine: bool) -> None:
    folder = own_directory("handshake")
    path = folder / "engine.json"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    os.close(fd)
    try:
        if is_engine:
            read_engine_file(str(folder))
        else:
            read_key_file(str(path), needs_secret=True)
    except (UsageError, ConfigError):
        return


def seeds() -> Iterator[bytes]:
    """Yield a valid and an invalid example of each form."""
    key = "a" * 40
    for url in (
        "ringlog:///run/x", f"ringlog://h:1?server_key={key}", "ringlog://[::1]:99", "ringlog://h:99999",
        "ringlog://[", "http://x", "ringlog://h:1?server_key=%", "ringlog://a@b:1", "ringlog:///%00",
    ):  # fmt: skip
        yield bytes([URL]) + url.encode()
    zap = [b"1.0", b"1", TCP_DOMAIN.encode(), b"::1", b"", b"CURVE", bytes(32)]
    yield bytes([ZAP]) + b"|".join(zap)
    yield bytes([ZAP]) + b"|".join([*zap[:5], b"NULL"])
    yield bytes([IDENTITY]) + encode_identity("0" * 32, 5, "/dev/shm/ringlog-0-abc")
    yield bytes([ENGINE]) + b'{"engine_id":"e","start_id":"s","shm_dir":"/x","data_dir":"/y","shards":2}'
    yield bytes([KEY]) + f'public_key = "{key}"\nsecret_key = "{key}"\n'.encode()
