"""The file engine.json: a running engine writes it to its run directory, and clients read it."""

from __future__ import annotations

import msgspec

ENGINE_FILE = "engine.json"


class EngineInfo(msgspec.Struct, frozen=True):
    """Contents of engine.json: how to reach the engine.

    Later versions may append fields. In a file of an older engine the last fields may be missing.
    """

    engine_id: str
    start_id: str
    """Changes with every start. A client that reads a different value opens new rings and resends its
    frames."""
    shm_dir: str
    data_dir: str
    shards: int
    protocol: int = 1
    version: str = ""
    supervisor_pid: int = 0
    """Informational only."""
    gateway_ipc: str = ""
    """Endpoint of the gateway's local socket. A bare name is relative to the run directory."""
    gateway_tcp: str = ""
    public_key: str = ""
    """CURVE key of the TCP endpoint (Z85)."""
    cold_dir: str = ""
    """Directory with the cold segments, from which clients on this host read them; "" if the cold tier is not
    a directory."""
    schedulers: int = 0
    """Number of schedulers. A client finds the scheduler of a topic by the topic's id."""
    http_url: str = ""
    """Address of the HTTP gateway, such as `http://127.0.0.1:4000`; "" if it does not run."""
    restore_id: str = ""
    """Changes when the data directory is restored from a backup; "" if it never was."""

    @property
    def log_id(self) -> str:
        """Identity of the log, for positions that are stored outside of the engine."""
        return log_id_of_engine(self.engine_id, self.restore_id)


def log_id_of_engine(engine_id: str, restore_id: str) -> str:
    """Return the identity of a log. A restored directory has the id of its engine, but another log."""
    return f"{engine_id}-{restore_id}" if restore_id else engine_id


def is_restored_log(log_id: str) -> bool:
    """Return whether the log with this identity is that of a restored directory."""
    return "-" in log_id
