"""ringlog: a durable event log and job queue on one host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringlog import cores

__version__ = "0.1.0"
cores.offer()  # Before anything of ours is imported: what is imported once stays what it is.

if TYPE_CHECKING:
    from ringlog.client import Client, connect

__all__ = ["Client", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    # The client is loaded when first asked for: `import ringlog` stays cheap for tools that only
    # want the version or an error class.
    if name in {"connect", "Client"}:
        cores.import_whole("ringlog.client")
        from ringlog import client

        return getattr(client, name)
    raise AttributeError(f"module 'ringlog' has no attribute {name!r}")
