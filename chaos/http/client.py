"""A client of the gateway that does no more than repeat what got no answer. Standard library only."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

READ_S = 10.0
"""Time limit (s) of a read from a socket. A request that takes longer is a finding."""
PAUSE_S = 0.02
"""Pause before a request is repeated."""
GIVE_UP_S = 30.0
"""Time after which a request that is still refused is a finding."""
HEARTBEAT = "heartbeat"
"""Kind of a comment in a stream."""
AGAIN = {429, 503}
"""Statuses that say: send it again."""


class ClientFinding(Exception):
    """An answer that a client would need code for, besides repeating."""


class Answer(NamedTuple):
    """A response of the gateway."""

    status: int
    body: Any


class Event(NamedTuple):
    """One event of a stream."""

    kind: str
    id: str
    data: Any


class Client:
    """One connection, which is opened again when it ended. `counts` is shared by all clients of a storm."""

    def __init__(self, url: str, counts: Counter[str], lock: threading.Lock) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        self._connection = http.client.HTTPConnection(self.host, self.port, timeout=READ_S)
        self._counts, self._lock = counts, lock

    def count(self, what: str, times: int = 1) -> None:
        """Count work of the storm."""
        with self._lock:
            self._counts[what] += times

    def once(self, method: str, path: str, body: Any = None) -> Answer | None:
        """Send a request once. None: the connection ended before the answer."""
        data = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request(method, path, data, {"content-type": "application/json"})
            reply = self._connection.getresponse()
            text = reply.read()
        except TimeoutError:
            raise ClientFinding(f"{method} {path} got no answer within {READ_S:g} s") from None
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self.count("connections lost")
            return None
        try:
            return Answer(reply.status, json.loads(text))
        except ValueError:
            raise ClientFinding(f"{method} {path} got {reply.status} with a body that is no JSON") from None

    def ask(
        self, method: str, path: str, body: Any = None, *, wanted: tuple[int, ...] = (200, 201)
    ) -> Answer:
        """Send a request until it is answered. Raises ClientFinding for any status but `wanted` and AGAIN."""
        until = time.monotonic() + GIVE_UP_S
        while time.monotonic() < until:
            answer = self.once(method, path, body)
            if answer is not None:
                if answer.status in wanted:
                    return answer
                if answer.status not in AGAIN:
                    raise ClientFinding(f"{method} {path} got {answer.status}: {answer.body}")
                self.count("refused for now")
            time.sleep(PAUSE_S)
        raise ClientFinding(f"{method} {path} was not served within {GIVE_UP_S:g} s")

    def events(self, path: str, last_event_id: str) -> Iterator[Event]:
        """Yield the events of a stream until its end. Raises LookupError if it is unknown."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=READ_S)
        headers: Mapping[str, str] = {"last-event-id": last_event_id} if last_event_id else {}
        try:
            connection.request("GET", path, None, {"accept": "text/event-stream", **headers})
            reply = connection.getresponse()
            if reply.status == 404:
                raise LookupError(path)
            if reply.status in AGAIN:
                self.count("refused for now")
                return
            if reply.status != 200:
                raise ClientFinding(f"GET {path} got {reply.status}: {reply.read(500)!r}")
            fields: dict[str, str] = {}
            while line := reply.readline():
                name, _, value = line.decode().rstrip("\n").partition(":")
                if line != b"\n":
                    fields[name] = value.removeprefix(" ")
                    continue
                if "event" in fields:
                    yield Event(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
                elif "" in fields:
                    yield Event(HEARTBEAT, "", None)
                fields = {}
        except TimeoutError:
            raise ClientFinding(f"GET {path} was silent for {READ_S:g} s") from None
        except (OSError, http.client.HTTPException):
            self.count("connections lost")
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
