"""Configuration: TOML, settings, key files and topic configs are accepted, or refused with a typed error."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from chaos.fuzz.scratch import own_directory
from ringlog.access.key_sources import parse_api_keys, parse_keys
from ringlog.config_sources import load_config
from ringlog.errors import ConfigError, CorruptData, InvalidRequest
from ringlog.quantities import parse_duration, parse_size
from ringlog.topic.config import TopicConfig

MAX_LEN = 512
SHARE = 1.0
KEYS, TOPIC, BYTES, FLAG, VARIABLE, SIZE, DURATION, FILE, API_KEYS, ENGINE = range(10)
_SETTING = (
    "wal.shards",
    "cold.timeout_s",
    "native.endpoint",
    "auth.allow_insecure",
    "log.level",
    "run.ring_bytes",
)


def check(data: bytes) -> None:
    """Parse one input. Only ConfigError, InvalidRequest and CorruptData may be raised inside."""
    how, rest = (data[0] % 10, data[1:]) if data else (0, b"")
    try:
        _take(how, rest)
    except (ConfigError, InvalidRequest, CorruptData):
        return


def _take(how: int, data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    match how:
        case 0:
            parse_keys(text, "keys.toml")
        case 1:
            _topic(data)
        case 2:
            kept = TopicConfig.from_bytes(data)
            if TopicConfig.from_bytes(kept.to_bytes()) != kept:
                raise AssertionError("a topic's config changes when it is stored")
        case 3:
            name, _, value = text.partition("=")
            load_config({name: value}, {}, "/", config_file=None)
        case 4:
            name, _, value = text.partition("=")
            load_config({}, {f"RINGLOG_{name}": value}, "/")
        case 5:
            _number(parse_size, text)
        case 6:
            _number(parse_duration, text)
        case 7:
            _file(data)
        case 8:
            parse_api_keys(text)
        case _:
            setting = _SETTING[len(text) % len(_SETTING)]
            load_config({setting: text}, {}, "/")


def _topic(data: bytes) -> None:
    try:
        given = msgspec.msgpack.decode(data, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    parsed = TopicConfig.parse(given, "t")
    if TopicConfig.parse(parsed.to_dict(), "t") != parsed:
        raise AssertionError(f"{given!r} is another config the second time")


def _number(parse: object, text: str) -> None:
    try:
        parse(text)  # type: ignore[operator]
    except ValueError:
        return


def _file(data: bytes) -> None:
    path = own_directory("config") / "config.toml"
    path.write_bytes(data)
    load_config({}, {}, "/", config_file=str(path))


def seeds() -> Iterator[bytes]:
    """Yield a valid and an invalid example of each form."""
    key = "a" * 40
    for text in (
        f'[[keys]]\nname = "x"\npublic_key = "{key}"\nscopes = ["read"]\nprefixes = ["a."]',
        "keys = 1", "[[keys]]",
    ):  # fmt: skip
        yield bytes([KEYS]) + text.encode()
    digest = "0" * 64
    yield bytes([KEYS]) + f'[[keys]]\nname = "x"\nbearer_sha256 = "{digest}"'.encode()
    for text in ("rl_a,rl_b:read+write:a.|b.", "k::", ":read", ","):
        yield bytes([API_KEYS]) + text.encode()
    for config in (
        {"ttl_ms": 5},
        {"durability": "fsync", "cap_records": 7},
        {"type": "queue", "durable": True},
        {},
    ):
        yield bytes([TOPIC]) + msgspec.msgpack.encode(config)
        yield bytes([BYTES]) + msgspec.msgpack.encode(config)
    for text in ("wal.shards=2", "x=", "cold.dir=/x"):
        yield bytes([FLAG]) + text.encode()
        yield bytes([VARIABLE]) + text.replace(".", "_").upper().encode()
    for text in ("1MiB", "1e999", "-1", "inf", "9" * 400, "1_0", "٣", "nan GiB"):
        yield bytes([SIZE]) + text.encode()
        yield bytes([DURATION]) + text.encode()
        yield bytes([ENGINE]) + text.encode()
    for text in (
        "[wal]\nshards = 2\n",
        '[topics."a.b"]\nttl = "1h"\n',
        "[wal]\nshards = 1e400\n",
        "a.b.c = {d=[1]}",
    ):
        yield bytes([FILE]) + text.encode()
