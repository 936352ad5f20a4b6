"""`python -m chaos`: the slice that runs on every change; ends with how many parts passed.

Each part is a program of its own, so that one that dies takes nothing with it. Arguments name parts.
"""

from __future__ import annotations

import subprocess
import sys
import time

PARTS: dict[str, list[str]] = {
    # Every legal disk image after every step of every history of up to two steps, recovered twice.
    "states": ["-m", "chaos.states", "2"],
    # Arbitrary and almost valid bytes against both frame decoders.
    "fuzz_frame": ["-m", "chaos.fuzz.fuzz_frame", "-max_total_time=45", "-print_final_stats=1"],
}
SECONDS_MAX = 540
"""A part that takes longer has failed."""


def run_part(name: str, arguments: list[str]) -> bool:
    """Run one part; True when it found nothing."""
    print(f"== {name}", flush=True)
    begun = time.perf_counter()
    try:
        code = subprocess.run([sys.executable, *arguments], timeout=SECONDS_MAX, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    print(
        f"== {name}: {'passed' if code == 0 else f'failed ({code})'} in {time.perf_counter() - begun:.0f} s"
    )
    return code == 0


def main() -> int:
    """Run the parts named, or all; exit status 1 when one failed, 2 for a name that is none."""
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    passed = [run_part(name, PARTS[name]) for name in names]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
