"""Network faults between remote clients and the gateway (RF-88 to RF-93, RF-98).

A proxy of the harness cuts, holds, delays or slows down connections between them, so the host needs no
special support. An acked record exists once and in order. A record without an ack exists at most once, and
its sender received an error. A case is `ROW/SEED`.

Settings: `rows`: a list, empty for all; `step`: bytes between two cuts of RF-91; `clients`: number for RF-98;
`rounds`: repetitions with other seeds while time remains.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from chaos.attack.arena import Arena, arena
from chaos.network import cuts, peers
from chaos.order import Account, Order
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError

Row = Callable[[Arena, random.Random], int]
KNOWN = {"rows": [], "step": 3, "clients": peers.CLIENTS, "rounds": 1}
SLOW = "RF-92"
"""This row only waits. It starts first and is judged last."""
KILLS_GATEWAY = "RF-98"


def _rows(order: Order) -> dict[str, Row]:
    given = order.choose(KNOWN)
    every: dict[str, Row] = {
        "RF-88": lambda place, dice: cuts.partitions(place, dice) + cuts.reads(place, dice),
        "RF-89": cuts.one_way,
        "RF-91": partial(cuts.every_byte, step=given["step"]),
        "RF-93": lambda place, dice: peers.slow(place, dice) + peers.deaf(place, dice),
        "RF-90": peers.far_away,
        KILLS_GATEWAY: partial(peers.comeback, clients=given["clients"]),
        SLOW: lambda place, _: peers.HalfOpen(place).judge(),
    }
    chosen = given["rows"] or every
    return {name: every[name] for name in every if name in chosen}


def run(order: Order, account: Account) -> None:
    """Run all rows against one engine, `rounds` times."""
    rows = _rows(order)
    with arena(order.scratch, storage={"enabled": False}, cold={}) as place:
        begun = time.monotonic()
        for number in range(order.choose(KNOWN)["rounds"]):
            if number and time.monotonic() - begun > order.seconds:
                break
            _round(order, account, place, rows, order.seed + number)
        account.count_work("promised", place.check_acknowledged())


def _round(order: Order, account: Account, place: Arena, rows: dict[str, Row], seed: int) -> None:
    place.check_canary()
    names = [name for name in rows if name not in {SLOW, KILLS_GATEWAY}]
    half_open = peers.HalfOpen(place) if SLOW in rows else None
    for name in names:
        _try(account, place, name, partial(rows[name], place, random.Random(f"{name}/{seed}")), seed)
    if half_open is not None:
        _try(account, place, SLOW, half_open.judge, seed)
    if KILLS_GATEWAY in rows:
        dice = random.Random(f"{KILLS_GATEWAY}/{seed}")
        _try(account, place, KILLS_GATEWAY, partial(rows[KILLS_GATEWAY], place, dice), seed)


def _try(account: Account, place: Arena, name: str, act: Callable[[], int], seed: int) -> None:
    begun = time.monotonic()
    before = place.census()
    try:
        cases = act()
        if name == KILLS_GATEWAY:
            place.check_canary()
        elif name == SLOW:
            place.judge(place.census())
        else:
            place.judge(before)
    except (GuaranteeBroken, RinglogError) as e:
        account.report_finding(f"{name}: {str(e).splitlines()[0][:500]}", f"{name}/{seed}", str(e))
        return
    finally:
        account.figures[f"{name}_s"] = round(time.monotonic() - begun, 2)
    account.count_work("cases", cases)
    account.count_work("rows", 1, name)


def replay(order: Order, case: str) -> None:
    """Run one row with one seed. Raises GuaranteeBroken."""
    name, _, seed = case.partition("/")
    with arena(order.scratch, storage={"enabled": False}, cold={}) as place:
        print(f"{name}: {_rows(order)[name](place, random.Random(f'{name}/{seed or 1}'))} cases")
        place.check_canary()
        print(f"{place.check_acknowledged()} promised records are there")
