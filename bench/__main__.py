"""`python -m bench AREA [--only TEXT] [--scale PART] [--rows FILE]`: measure, print, write the rows.

The rows are written to bench/results/AREA.json, or only to FILE.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from bench.host import stop_in_order_on_signals
from bench.machine import facts, settle
from bench.rows import SCALE, save, show, write
from bench.systems.programs import PeerMissing

AREAS = ("commit", "delivery", "http", "peers", "peers-busy", "peers-more", "queue", "spark", "storage")


def main() -> int:
    """Run the command line.

    Returns 0 if everything was measured, even if a row misses its target (the table shows that). Returns 1 if
    a peer is not installed.
    """
    parser = argparse.ArgumentParser(prog="bench")
    parser.add_argument("area", choices=AREAS)
    parser.add_argument(
        "--only", default="", help="run only parts whose name contains this text; other rows are kept"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="share of the data to use; if it is not 1, bench/results is not written",
    )
    parser.add_argument("--rows", type=Path, help="write the rows to this file instead of bench/results")
    arguments = parser.parse_args()
    os.environ[SCALE] = str(arguments.scale)
    if arguments.scale == 1.0:
        settle()
    machine = facts()
    try:
        rows = importlib.import_module(f"bench.{arguments.area.replace('-', '_')}").rows(arguments.only)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 1
    show(rows)
    if arguments.rows:
        write(arguments.rows, arguments.area, rows, machine)
    elif arguments.scale == 1.0:
        print(f"\nwritten to {save(arguments.area, rows, machine, keep_others=bool(arguments.only))}")
    return 0


if __name__ == "__main__":
    stop_in_order_on_signals()
    sys.exit(main())
