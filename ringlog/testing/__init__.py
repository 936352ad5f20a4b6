"""Test tools, for ringlog's own tests and for programs that use ringlog. No other package imports this one.

Names are loaded on first use, so that a test of a pure core does not import the client and the process
code.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ManualClock": "ringlog.testing.clock",
    "PowerLossDamage": "ringlog.testing.disk",
    "DiskFault": "ringlog.testing.disk",
    "FaultyDisk": "ringlog.testing.disk",
    "Halted": "ringlog.testing.disk",
    "Monitor": "ringlog.testing.disk",
    "RecordingDisk": "ringlog.testing.disk",
    "SimulatedDisk": "ringlog.testing.disk",
    "engine": "ringlog.testing.real_engine",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  a computed list keeps table and exports one


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ringlog.testing' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    # Cache the name: the import of a submodule with the same name would replace it as an attribute.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
