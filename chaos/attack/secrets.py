"""Checks that no key and no payload appears in logs, status, /proc, or files that must not contain them."""

from __future__ import annotations

import random
from pathlib import Path

from chaos.attack.arena import MARKER, Arena
from ringlog.drill.checks import GuaranteeBroken, require
from ringlog.envelope.wire import encode


def searched(arena: Arena, dice: random.Random) -> int:
    """Search secrets in the engine's log, engine.json, status, /proc entries and all of its files (RF-113).

    This row runs after all others. Data files may contain payloads, but no secret key.
    """
    del dice
    keys = [arena.server.secret, arena.owner.secret, arena.limited.secret]
    keys += [key.secret for key in arena.by_scope.values()]
    looked = 0
    for what, text in _said(arena):
        for secret in (*keys, MARKER):
            kind = "a payload" if secret == MARKER else "a secret key"
            require(secret not in text, f"{what} contains {kind}")
        looked += 1
    for path in (*Path(arena.running.data_dir).rglob("*"), *Path(arena.running.info.shm_dir).rglob("*")):
        if path.is_file():
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # removed by the compactor or the reclaimer
                continue
            require(not any(key in data for key in keys), f"{path.name} contains a secret key")
            looked += 1
    if looked < len(_said(arena)) + 5:
        raise GuaranteeBroken(f"only {looked} places were searched")
    return looked


def _said(arena: Arena) -> list[tuple[str, bytes]]:
    running = arena.running
    said = [
        ("the engine's log", running.log_path.read_bytes()),
        ("engine.json", (Path(running.run_dir) / "engine.json").read_bytes()),
        ("the status", encode(running.status())),
    ]
    for name, pid in arena.census().pids.items():
        said += [
            (f"{entry} of {name}", Path(f"/proc/{pid}/{entry}").read_bytes())
            for entry in ("cmdline", "comm", "environ")
        ]
    require(b"ready" in said[0][1], "the log is empty: nothing was searched")
    return said
