"""All disks for tests: in-memory, recording, failing and monitoring.

They can be stacked. `FaultyDisk(SimulatedDisk("/data"), DiskFault("data_sync", 2, "EIO"))` fails the second
data sync of an in-memory disk. A `RecordingDisk` around it records the calls that succeeded.
"""

from __future__ import annotations

from ringlog.testing.faulty_disk import DiskFault, FaultyDisk, Halted
from ringlog.testing.monitor_disk import Monitor, MonitorDisk, SyncOrderViolation
from ringlog.testing.recording_disk import (
    Allocate,
    Create,
    DiskNote,
    MakeDir,
    Operation,
    RecordingDisk,
    RemoveDir,
    Rename,
    SetLength,
    SyncData,
    SyncDir,
    SyncFile,
    Unlink,
    Write,
)
from ringlog.testing.simulated_disk import SimulatedDisk
from ringlog.testing.simulated_file import PowerLossDamage

__all__ = [
    "Allocate",
    "Create",
    "DiskFault",
    "DiskNote",
    "FaultyDisk",
    "Halted",
    "MakeDir",
    "Monitor",
    "MonitorDisk",
    "Operation",
    "PowerLossDamage",
    "RecordingDisk",
    "RemoveDir",
    "Rename",
    "SetLength",
    "SimulatedDisk",
    "SyncData",
    "SyncDir",
    "SyncFile",
    "SyncOrderViolation",
    "Unlink",
    "Write",
]
