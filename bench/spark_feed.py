"""Write one small record every 50 ms until the process is terminated."""

from __future__ import annotations

import sys
import time

import ringlog

EVERY_S = 0.05
END_S = 600.0


def main(url: str, topic: str) -> int:
    """Write for END_S at most."""
    deadline = time.monotonic() + END_S
    with ringlog.connect(url, wait=10) as client, client.producer(topic) as out:
        while time.monotonic() < deadline:
            out.send(b"x" * 100).result(30)
            time.sleep(EVERY_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
