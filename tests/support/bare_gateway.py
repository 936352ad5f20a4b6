"""An HTTP gateway without an engine."""

from __future__ import annotations

from typing import Any

from ringlog.actors.http_gateway.gateway import Gateway


def bare_gateway(**fields: Any) -> Gateway:
    """Return a gateway that has only these attributes, and no stream."""
    found = object.__new__(Gateway)
    vars(found).update({"is_draining": False, "streams": set(), **fields})
    return found
