"""A cold tier that is read alone, as one text: it goes where else the data directory does. Pure."""

from __future__ import annotations

import json

PREFIX = "cold-tier-alone:"


def format_address(cold: str, snapshots: str) -> str:
    """`cold`: directory or URL; `snapshots`: the directory above their `meta`, empty = the cold place."""
    return PREFIX + json.dumps([cold, snapshots])


def is_address(path: str) -> bool:
    """Is this text one of `address`?"""
    return path.startswith(PREFIX)


def parse_address(path: str) -> tuple[str, str]:
    """Inverse of `address`."""
    cold, snapshots = json.loads(path.removeprefix(PREFIX))
    return str(cold), str(snapshots)
