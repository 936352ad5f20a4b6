"""Tools for tests: ours, and those of programs that use ringlog. Nothing else imports this package.

Names are loaded when they are first asked for, so that a test of a pure core does not pay for the
client and the process machinery.
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
    # Kept here: loading the module `engine` put the module where the function of that name belongs.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
