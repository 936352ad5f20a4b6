"""The systems by name: one way to start each, one client for each."""

from __future__ import annotations

import importlib
from typing import Any

from bench.systems.base import Client, Server, Way

NAMES = ("ringlog", "redis", "beanstalkd", "nats", "kafka")
"""Ours first."""


def require(*names: str) -> None:
    """Raise PeerMissing, naming `make peers`, when one of these is not installed."""
    for name in names:
        _module(name).require()


def start(name: str, durability: str, *sets: str) -> Any:
    """Start a server of `durability` memory, page, disk or fsync; `sets` are settings of our engine.

    Returns a Server, or a QueueServer where the system is one of the queue area's.
    """
    found: Server = _module(name).Server(durability, *(sets if name == "ringlog" else ()))
    return found


def connect(name: str, address: str, topic: str, way: Way) -> Client:
    """A client of that system."""
    found: Client = _module(name).Client(address, topic, way)
    return found


def _module(name: str) -> Any:
    if name not in NAMES:
        raise ValueError(f"no system {name}: there are {', '.join(NAMES)}")
    return importlib.import_module(f"bench.systems.{name}")
