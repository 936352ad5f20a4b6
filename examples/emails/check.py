"""Was every email delivered?"""

from __future__ import annotations

import sys
from collections import Counter

from mail import OUTBOX
from shop import COUNT


def main() -> int:
    """Exit status 0 when each is in the outbox but the one that has no address."""
    wanted = set(range(1, COUNT + 1)) - {13}
    there = {int(path.name) for path in OUTBOX.iterdir() if path.name.isdigit()}
    times = Counter(int(line.split()[0]) for line in (OUTBOX / "log").read_text().splitlines())
    twice = sum(1 for count in times.values() if count > 1)
    print(f"{len(there)} delivered, {len(wanted - there)} missing, {twice} of them more than once")
    return 0 if there == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
