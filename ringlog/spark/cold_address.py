"""Address of a cold tier that is read without its engine, as one string in place of a data directory.

Pure.
"""

from __future__ import annotations

import json

PREFIX = "cold-tier-alone:"


def format_address(cold: str, snapshots: str) -> str:
    """Return the address of a cold tier.

    `cold` is a directory or URL. `snapshots` is the parent directory of their `meta`; empty means `cold`
    itself.
    """
    return PREFIX + json.dumps([cold, snapshots])


def is_address(path: str) -> bool:
    """Return whether the text is an address from `format_address`."""
    return path.startswith(PREFIX)


def parse_address(path: str) -> tuple[str, str]:
    """Return (cold, snapshots) of an address; the inverse of `format_address`."""
    cold, snapshots = json.loads(path.removeprefix(PREFIX))
    return str(cold), str(snapshots)
