"""Kill all shards of the engine as brutally as possible."""

from __future__ import annotations

import json
import os
import signal
import subprocess


def main() -> None:
    """Ask the engine for their pids, and send SIGKILL."""
    shown = subprocess.run(["ringlog", "status", "--output", "json"], check=True, capture_output=True)
    for process in json.loads(shown.stdout)["processes"]:
        if process["kind"] == "wal_shard":
            os.kill(process["pid"], signal.SIGKILL)
            print(f"killed {process['name']}")


if __name__ == "__main__":
    main()
