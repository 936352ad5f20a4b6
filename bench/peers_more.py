"""The rows of bench/peers.py against Kafka: `make bench AREA=peers-more`, after `make peers MORE=1`."""

from __future__ import annotations

from bench.peers import comparison_rows, figures, measured
from bench.rows import Row

PEERS = ("kafka",)


def rows(only: str = "") -> list[Row]:
    """Return all rows of the area, without targets, or those of parts whose name contains `only`."""
    return comparison_rows(figures(), measured(PEERS, only), PEERS, is_first_plain=False)
