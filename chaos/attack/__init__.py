"""Hostile clients and hostile local users against a real engine (RF-94, RF-96, RF-99..RF-113).

Each row runs one attack. After each row the class checks that the canary client is served, that no process
restarted, and that memory and descriptors are back at their earlier level. At the end it kills every process
twice. Both recoveries, first from the log and then from a snapshot, must restore the same facts and every
acknowledged record. A case is `ROW/SEED`.

Settings: `rows` (list of row ids; empty: all), `idle` (connections of the flood), `per_kind` (variants of
each message kind for each socket), `tags` (number of tags that the pattern row writes), `plants` (number of
planted files in RF-111; the seed selects them), `rounds` (repetitions with other seeds while time remains).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from functools import partial

from chaos.attack import envelopes, local, names, rights, secrets, sockets
from chaos.attack.arena import Arena, Census, arena, check_recovery
from chaos.order import Account, CannotRun, Order
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError

Row = Callable[[Arena, random.Random], int]
"""Attack function. It returns the number of cases that it tried, and raises GuaranteeBroken."""
KNOWN = {
    "rows": [], "idle": sockets.IDLE_CONNECTIONS, "per_kind": envelopes.PER_KIND, "tags": names.TAGS,
    "rounds": 1, "plants": 4,
}  # fmt: skip
LAST = "RF-113"
"""Row that runs last: it searches the output that the other rows caused."""


def rows_of(order: Order) -> dict[str, Row]:
    """Return the selected rows by id, in the order in which they run."""
    given = order.choose(KNOWN)
    every: dict[str, Row] = {
        "RF-105": rights.strangers,
        "RF-106": rights.table,
        "RF-107": names.names,
        "RF-104": envelopes.old_news,
        "RF-96": sockets.identities,
        "RF-110": local.other_user,
        "RF-112": local.bound,
        "RF-100": partial(envelopes.edges, per_kind=given["per_kind"]),
        "RF-99": sockets.no_handshakes,
        "RF-101": sockets.parts,
        "RF-103": names.decompression,
        "RF-108": partial(names.patterns, tags=given["tags"]),
        "RF-94": partial(sockets.floods, idle=given["idle"]),
        "RF-111": partial(local.planted, most=given["plants"]),
        LAST: secrets.searched,
    }
    chosen = given["rows"] or every
    return {name: every[name] for name in every if name in chosen}


def run(order: Order, account: Account) -> None:
    """Run all rows against one engine, `rounds` times."""
    rows = rows_of(order)
    with arena(order.scratch) as place:
        before = place.settle_and_census()
        begun, rounds, last = time.monotonic(), order.choose(KNOWN)["rounds"], list(rows)[-1]
        for number in range(rounds):
            if number and time.monotonic() - begun > order.seconds:
                break
            for name, row in rows.items():
                goes_on = name != last or number + 1 < rounds
                after = _try(account, place, before, name, row, order.seed + number, goes_on=goes_on)
                if after is None:
                    return
                before = after
        try:
            check_recovery(place)
        except (GuaranteeBroken, RinglogError) as e:
            account.report_finding(
                f"recovery: {str(e).splitlines()[0][:500]}", f"{last}/{order.seed}", str(e)
            )
            return
        account.count_work("promised", place.check_acknowledged())


def _try(
    account: Account, place: Arena, before: Census, name: str, row: Row, seed: int, *, goes_on: bool
) -> Census | None:
    """Run one row.

    Returns the census that the next row is compared with. If the row failed and `goes_on` is true, this is a
    new census of the damaged engine. Returns None if the engine can no longer be used.
    """
    begun = time.monotonic()
    try:
        cases = row(place, random.Random(f"{name}/{seed}"))
        place.judge(before)
    except CannotRun as e:
        account.skip(name, str(e))
        return before
    except (GuaranteeBroken, RinglogError) as e:
        account.report_finding(f"{name}: {str(e).splitlines()[0][:500]}", f"{name}/{seed}", str(e))
        if not goes_on:
            return before
        # Damage stays. The next row is compared with the present state of the engine.
        with contextlib.suppress(GuaranteeBroken, RinglogError):
            return place.settle_and_census()
        return None
    finally:
        account.figures[f"{name}_s"] = round(time.monotonic() - begun, 2)
    account.count_work("cases", cases)
    account.count_work("rows", 1, name)
    return before


def replay(order: Order, case: str) -> None:
    """Run one row with one seed. Raises GuaranteeBroken."""
    name, _, seed = case.partition("/")
    row = rows_of(order)[name]
    with arena(order.scratch) as place:
        before = place.settle_and_census()
        print(f"{name}: {row(place, random.Random(f'{name}/{seed or 1}'))} cases")
        place.judge(before)
        print(f"{place.check_acknowledged()} promised records are there")
