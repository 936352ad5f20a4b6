"""The processes of an engine: kinds, names, slots on the board, sockets and bells."""

from __future__ import annotations

from ringlog.limits import HTTP_PROCESSES_MAX, PROCESSES_MAX

WAL_SHARD = "wal_shard"
GATEWAY = "gateway"
COMPACTOR = "compactor"
RECLAIMER = "reclaimer"
RELOCATOR = "relocator"
HTTP_GATEWAY = "http_gateway"
SCHEDULER = "scheduler"
SUPERVISOR = "supervisor"
KINDS = (WAL_SHARD, GATEWAY, COMPACTOR, RECLAIMER, RELOCATOR, HTTP_GATEWAY, SCHEDULER)
"""Kinds of actor. ProcessField.KIND is an index into this tuple."""

SUPERVISOR_SLOT = 0
"""Process slot of the supervisor. Shard n has slot 1 + n. The other kinds follow in their order, except the
HTTP gateways: they have the last slots of the board, and the slot in that order is not used."""


def shard_slot(shard: int) -> int:
    """Return the process slot of a shard."""
    return SUPERVISOR_SLOT + 1 + shard


def slot_of(kind: str, shards: int) -> int:
    """Return the process slot of a kind with a single process. It does not depend on which others run."""
    return shard_slot(shards) + KINDS.index(kind) - KINDS.index(GATEWAY)


def scheduler_slot(shards: int, n: int) -> int:
    """Return the process slot of a scheduler. Only HTTP gateways come after schedulers."""
    return shard_slot(shards) + KINDS.index(SCHEDULER) - KINDS.index(GATEWAY) + n


def http_gateway_slot(n: int) -> int:
    """Return the process slot of an HTTP gateway."""
    return PROCESSES_MAX - HTTP_PROCESSES_MAX + n


def shard_name(shard: int) -> str:
    """Return the name of a shard's process."""
    return f"{WAL_SHARD}-{shard:02d}"


def scheduler_name(number: int) -> str:
    """Return the name of a scheduler's process."""
    return f"{SCHEDULER}-{number:02d}"


def http_gateway_name(number: int) -> str:
    """Return the name of an HTTP gateway's process."""
    return f"{HTTP_GATEWAY}-{number:02d}"


def socket_of(shm_dir: str, name: str) -> str:
    """Return the endpoint of a process's control socket."""
    return f"ipc://{shm_dir}/{name}.sock"


def bell_of(shm_dir: str, name: str) -> str:
    """Return the path of the named pipe that wakes up a shard or a scheduler."""
    return f"{shm_dir}/{name}.bell"


def shard_socket(shm_dir: str, shard: int) -> str:
    """Return the endpoint of a shard's control socket."""
    return socket_of(shm_dir, shard_name(shard))


def shard_bell(shm_dir: str, shard: int) -> str:
    """Return the path of the named pipe that wakes up a shard."""
    return bell_of(shm_dir, shard_name(shard))


def scheduler_socket(shm_dir: str, number: int) -> str:
    """Return the endpoint of a delivery scheduler."""
    return socket_of(shm_dir, scheduler_name(number))


def http_gateway_socket(shm_dir: str, number: int) -> str:
    """Return the endpoint on which an HTTP gateway serves the others of its engine."""
    return socket_of(shm_dir, http_gateway_name(number))


def http_gateway_counts(shm_dir: str, number: int) -> str:
    """Return the path of the file in which an HTTP gateway counts the requests that it has answered."""
    return f"{shm_dir}/{http_gateway_name(number)}.counts"


def scheduler_bell(shm_dir: str, number: int) -> str:
    """Return the path of the named pipe that wakes up a scheduler."""
    return bell_of(shm_dir, scheduler_name(number))
