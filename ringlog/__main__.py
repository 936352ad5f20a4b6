"""`python -m ringlog`: the command `ringlog`, where the directory of scripts is not on PATH."""

from __future__ import annotations

import sys

from ringlog.cli import main

if __name__ == "__main__":
    sys.exit(main())
