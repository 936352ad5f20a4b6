"""The pure parts of the HTTP gateway: routes, bodies, hosts, keys and cursors are taken or refused, typed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ringlog.access.key_ring import BearerKeys
from ringlog.access.key_sources import parse_api_keys
from ringlog.actors.http_gateway.admin.topics import decode_cursor
from ringlog.actors.http_gateway.api.host_check import HostCheck, require_host
from ringlog.actors.http_gateway.api.request import check_structure, decode
from ringlog.actors.http_gateway.api.route_table import RouteTable
from ringlog.actors.http_gateway.records.writes import decode_write
from ringlog.actors.http_gateway.routes import ROUTES
from ringlog.client.watches.events import decode_cursors
from ringlog.errors import RinglogError

MAX_LEN = 1_024
SHARE = 1.0
ROUTE, BODY, WRITE, HOST, ORIGIN, KEY, CURSOR, CURSORS = range(8)
_TABLE = RouteTable(ROUTES)
_BODIES = tuple({route.body: None for route in ROUTES if route.body is not None})
_METHODS = "GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"
_HOSTS = HostCheck()


def check(data: bytes) -> None:
    """Take one input. Only RinglogError may be raised inside."""
    how, rest = (data[0], data[1:]) if data else (0, b"")
    try:
        _take(how, rest)
    except RinglogError:
        return


def _take(how: int, data: bytes) -> None:
    text = data.decode("latin-1")
    match how % 8:
        case 0:
            _route(_METHODS[how // 8 % len(_METHODS)], data.decode("utf-8", "replace"))
        case 1:
            decode(data, _BODIES[how // 8 % len(_BODIES)])
        case 2:
            _write(data)
        case 3:
            _HOSTS.require_loopback(require_host(text))
        case 4:
            origin, _, site = text.partition("\n")
            _HOSTS.require_own_page(origin, site)
        case 5:
            _keys(data.decode("utf-8", "replace"))
        case 6:
            decode_cursor(text)
        case _:
            decode_cursors(text)


def _route(method: str, path: str) -> None:
    route, names = _TABLE.find(method, path)
    if len(names) != route.path.count("{}") or not all(names):
        raise AssertionError(f"{path!r} is {route.name} with the names {names!r}")


def _write(data: bytes) -> None:
    write = decode_write(data)
    for record in write.body.records:
        check_structure(bytes(record.data))
        msgspec.json.decode(record.data)
        found = (record.tag is not None, record.node is not None, bytes(record.meta) != b"null")
        if any(is_there and not write.fields >> bit & 1 for bit, is_there in enumerate(found)):
            raise AssertionError(f"a field was overlooked: {found}, {write.fields}")


def _keys(text: str) -> None:
    keys, _, header = text.partition("\n")
    entries = [(each.digest, each.principal) for each in parse_api_keys(keys)]
    BearerKeys(entries).find(header)


def seeds() -> Iterator[bytes]:
    """Yield valid and invalid examples of each form."""
    for route in ROUTES:
        method = _METHODS.index(route.method)
        yield bytes([ROUTE + 8 * method]) + route.path.replace("{}", "a.b").encode()
    yield from (bytes([ROUTE]) + path for path in (b"/", b"//", b"/v0/topics/", b"/v0/topics/{}", b"*"))
    for number, body in enumerate(_BODIES):
        names = {field.encode_name: 1 for field in msgspec.structs.fields(body)}
        yield bytes([BODY + 8 * number]) + msgspec.json.encode(names)
    for write in (
        b'{"records":[{"data":1}]}',
        b'{ "records": [{"data": {"$base64": "AA=="}, "tag": "t", "meta": {"k": 1}}]}',
        b'{"records":[{"data":1,"data":2}]}', b"[" * 200, b'{"records":[{"data":"\xff"}]}',
    ):  # fmt: skip
        yield bytes([WRITE]) + write
    for host in ("localhost", "localhost:1", "127.0.0.1:80", "[::1]:80", "[::1", "::1", "1.2.3.4.", ":"):
        yield bytes([HOST]) + host.encode()
        yield bytes([ORIGIN]) + f"http://{host}".encode()
    for keys in ("rl_abcdefghijklmnop:read\nBearer rl_abcdefghijklmnop", "a,b::\nbearer a", "\nBearer "):
        yield bytes([KEY]) + keys.encode()
    for cursor in ("", "YQ", "YQ==", "e30", "eyJhIjoxfQ", "eyJhIjpbMSwyXX0", "é", "W10"):
        yield bytes([CURSOR]) + cursor.encode()
        yield bytes([CURSORS]) + cursor.encode()
