"""The file a running engine leaves in its run directory, for its clients."""

from __future__ import annotations

import msgspec

ENGINE_FILE = "engine.json"


class EngineInfo(msgspec.Struct, frozen=True):
    """Contents of engine.json: how to reach the engine. Fields may be added; the last ones may be missing."""

    engine_id: str
    start_id: str
    """New for every start: a client that sees another one opens new rings and resends."""
    shm_dir: str
    data_dir: str
    shards: int
    protocol: int = 1
    version: str = ""
    supervisor_pid: int = 0
    """For people."""
    gateway_ipc: str = ""
    """Endpoint of the gateway's local socket; a bare name lies in the run directory."""
    gateway_tcp: str = ""
    public_key: str = ""
    """CURVE key of the TCP endpoint (Z85)."""
    cold_dir: str = ""
    """Where cold segments lie, when that is a directory: clients of this host read them there."""
    schedulers: int = 0
    """How many share the topics: clients find a topic's own by its id."""
