"""The processes of an engine: their kinds, names, slots of the board, sockets and bells."""

from __future__ import annotations

WAL_SHARD = "wal_shard"
GATEWAY = "gateway"
COMPACTOR = "compactor"
RECLAIMER = "reclaimer"
RELOCATOR = "relocator"
SCHEDULER = "scheduler"
SUPERVISOR = "supervisor"
KINDS = (WAL_SHARD, GATEWAY, COMPACTOR, RECLAIMER, RELOCATOR, SCHEDULER)
"""Kinds of actor; the index is what the board's P.KIND holds."""

SUPERVISOR_SLOT = 0
"""The supervisor's own process slot; shard n has slot 1 + n, then come the other kinds in their order."""


def shard_slot(shard: int) -> int:
    """Process slot of a shard."""
    return SUPERVISOR_SLOT + 1 + shard


def slot_of(kind: str, shards: int) -> int:
    """Process slot of a child that is the only one of its kind; its own whether or not the others run."""
    return shard_slot(shards) + KINDS.index(kind) - KINDS.index(GATEWAY)


def scheduler_slot(shards: int, n: int) -> int:
    """Process slot of a scheduler; they come behind all others."""
    return shard_slot(shards) + KINDS.index(SCHEDULER) - KINDS.index(GATEWAY) + n


def shard_name(shard: int) -> str:
    """Name of a shard's process."""
    return f"{WAL_SHARD}-{shard:02d}"


def scheduler_name(number: int) -> str:
    """Name of a scheduler's process."""
    return f"{SCHEDULER}-{number:02d}"


def socket_of(shm_dir: str, name: str) -> str:
    """Endpoint of a process's control socket."""
    return f"ipc://{shm_dir}/{name}.sock"


def bell_of(shm_dir: str, name: str) -> str:
    """Path of the named pipe a shard or a scheduler sleeps on."""
    return f"{shm_dir}/{name}.bell"


def shard_socket(shm_dir: str, shard: int) -> str:
    """Endpoint of a shard's control socket."""
    return socket_of(shm_dir, shard_name(shard))


def shard_bell(shm_dir: str, shard: int) -> str:
    """Path of the named pipe a shard sleeps on."""
    return bell_of(shm_dir, shard_name(shard))


def scheduler_socket(shm_dir: str, number: int) -> str:
    """Endpoint of a delivery scheduler."""
    return socket_of(shm_dir, scheduler_name(number))


def scheduler_bell(shm_dir: str, number: int) -> str:
    """Path of the named pipe a scheduler sleeps on."""
    return bell_of(shm_dir, scheduler_name(number))
