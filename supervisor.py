"""`python -m supervisor`: the same as `ringlog serve`, from a checkout. Code: ringlog.supervision.serve."""

from __future__ import annotations

import argparse
import sys

from ringlog.shm import unsupported_host_reason


def main() -> int:
    """Parse the command line, run the engine, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="supervisor", description="Run the ringlog engine in the foreground."
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file (default: ./ringlog.toml)")
    parser.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], dest="sets")
    parser.add_argument("--data-dir", metavar="DIR", help="the same as --set data.dir=DIR")
    parser.add_argument("--check", action="store_true", help="validate the settings and exit")
    parser.add_argument("--show", action="store_true", help="print the process tree and exit")
    options = parser.parse_args()
    trouble = unsupported_host_reason()
    if trouble:
        parser.exit(1, f"{trouble}\n")
    from ringlog.supervision.serve import serve

    return serve(
        config_file=options.config,
        sets=options.sets,
        data_dir=options.data_dir,
        check=options.check,
        show=options.show,
    )


if __name__ == "__main__":
    sys.exit(main())
