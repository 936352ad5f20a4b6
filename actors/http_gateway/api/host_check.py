"""Which requests a gateway without keys admits: to a Host that names loopback, from no foreign page. Pure.

Without keys the gateway listens on loopback, but a web page in a browser of this machine reaches it too, if
the page's own name resolves to 127.0.0.1 (DNS rebinding). The browser then sends that name as Host.

Pages of other sites may also send requests whose answers they cannot read, such as forms and images, and open
WebSockets. Browsers then send Origin or, with neither a body nor CORS, `sec-fetch-site: cross-site`.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ringlog.errors import Forbidden, InvalidRequest

_HOST_CHARS_MAX = 300


class HostCheck:
    """Admits hosts that name loopback. Remembers the last one, since clients rarely change it.

    `admits_all`: `auth.allow_insecure` serves everybody.
    """

    __slots__ = ("_admits_all", "_admitted")

    def __init__(self, *, admits_all: bool = False) -> None:
        self._admitted, self._admits_all = "localhost", admits_all

    def require_loopback(self, host: str) -> None:
        """Raise Forbidden unless the host, with or without a port, is localhost or a loopback address."""
        if host == self._admitted:
            return
        if not (self._admits_all or is_loopback(host)):
            raise Forbidden(
                "without keys the gateway admits only requests to localhost or a loopback address; "
                "configure keys to serve other host names",
                host=host[:_HOST_CHARS_MAX],
            )
        self._admitted = host

    def require_own_page(self, origin: str, site: str) -> None:
        """Raise Forbidden if a web page of another host sends the request.

        Args:
            origin: The Origin header, "" without one. Programs send neither this one nor the other.
            site: The header `sec-fetch-site`, which counts where there is no Origin.
        """
        is_foreign = not is_loopback(host_of(origin)) if origin else site == "cross-site"
        if is_foreign and not self._admits_all:
            raise Forbidden(
                "without keys the gateway admits web pages of localhost only; configure keys to serve others",
                origin=origin[:_HOST_CHARS_MAX],
            )


def require_host(host: str | None) -> str:
    """Return the Host header. Raises InvalidRequest without one."""
    if not host:
        raise InvalidRequest("the request needs a Host header")
    return host


def is_loopback(host: str) -> bool:
    """Return whether a Host header names loopback: localhost, 127.0.0.0/8 or [::1], with any port."""
    if len(host) > _HOST_CHARS_MAX or not host.isascii():
        return False
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        port = rest[1:]
        if not bracket or (rest and rest[0] != ":"):
            return False
    else:
        name, _, port = host.partition(":")
    if port and not port.isdigit():
        return False
    if name.lower() in {"localhost", "localhost."}:
        return not host.startswith("[")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback and (address.version == 6) == host.startswith("[")


def host_of(origin: str) -> str:
    """Return `host:port` of an origin, or "" if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
