"""Compare the working tree with another revision: `make bench-against REV=… AREA=…`.

Runs one area of benchmarks in both trees alternately, at least seven times each. The tree that goes first
alternates. Prints for each row the median of the pairs' ratios with its interval, and writes
build/bench-against/AREA.json after every pair. The working tree is measured as it is, with uncommitted
changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bench.__main__ import AREAS
from bench.host import stop_in_order_on_signals
from bench.machine import facts
from bench.paired import PAIRS, compare, show
from bench.revision import PLACE, ROOT, RevisionError, Tree, build, compile_bytecode, resolve, worktree
from bench.rows import Row, progress

HERE = "the working tree"
Pairs = list[tuple[list[Row], list[Row]]]


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison.

    Returns 0 if all pairs were measured, whatever the ratios; 1 with the reason if not; 130 after an
    interrupt.
    """
    options = _parser().parse_args(arguments)
    pairs: Pairs = []
    try:
        _measure(options, pairs)
    except RevisionError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted after {len(pairs)} pairs", file=sys.stderr)
        return 130
    finally:
        if pairs:
            show(compare(pairs), HERE, options.rev)
            print(f"written to {PLACE / f'{options.area}.json'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.against", description=__doc__.splitlines()[0])
    parser.add_argument("--rev", required=True, help="the revision to compare with")
    parser.add_argument("--area", required=True, choices=AREAS)
    parser.add_argument("--only", default="", help="run only parts whose name contains this text")
    parser.add_argument("--pairs", type=_pairs, default=PAIRS, help=f"number of pairs, at least {PAIRS}")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data to use, to try it out")
    parser.add_argument(
        "--sources", dest="compiled", action="store_false", help="run the sources of both, as a trial"
    )
    return parser


def _pairs(text: str) -> int:
    if int(text) < PAIRS:
        raise argparse.ArgumentTypeError(f"must be >= {PAIRS}, got {text}")
    return int(text)


def _measure(options: argparse.Namespace, pairs: Pairs) -> None:
    commit = resolve(options.rev)
    with worktree(commit) as path:
        new, old = Tree(HERE, ROOT, options.compiled), Tree(options.rev, path, options.compiled)
        for tree in (new, old):
            tree.require_own_code()
            tree.require_area(options.area, options.scale)
        progress(f"compiling {options.rev} ({commit[:12]})")
        build(old)
        if new.compiled() != old.compiled():
            raise RevisionError(
                f"{HERE} has compiled {new.compiled()}, {options.rev} {old.compiled()}: run `make compiled`"
            )
        for tree in (new, old):
            compile_bytecode(tree)
            tree.require_compiled()
        machine = facts()
        for i in range(options.pairs):
            rows: dict[str, list[Row]] = {}
            for tree in order(i, new, old):
                progress(f"pair {i + 1}/{options.pairs}: {tree.name}")
                rows[tree.name] = tree.measure(options.area, options.only, options.scale)
            pairs.append((rows[new.name], rows[old.name]))
            _write(options, commit, pairs, machine)


def order(pair: int, new: Tree, old: Tree) -> tuple[Tree, Tree]:
    """Return the trees in the order of this pair.

    It alternates, so that a drift of the machine favours neither.
    """
    return (new, old) if pair % 2 == 0 else (old, new)


def _write(options: argparse.Namespace, commit: str, pairs: Pairs, machine: dict[str, Any]) -> None:
    """Write the verdict so far, and the rows of every run."""
    verdict = compare(pairs)
    found = {
        "area": options.area,
        "only": options.only,
        "scale": options.scale,
        "revision": commit,
        "pairs": len(pairs),
        "interval": "sign test on the ratios of the pairs",
        "machine": machine,
        "rows": [each.as_row() for each in verdict.comparisons],
        "only_in_the_working_tree": list(verdict.only_new),
        "only_in_the_revision": list(verdict.only_old),
        "runs": [{"new": new, "old": old} for new, old in pairs],
    }
    (PLACE / f"{options.area}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    stop_in_order_on_signals()
    sys.exit(main())
