"""`python -m demo`: run the demo, print a table, write build/demo.json. Exits with 1 if a check fails."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from demo import report, spark_stage
from demo.progress import Progress
from demo.run import Outcome, Plan, run

FLIGHTS = 336_776
BUILD = Path("build")
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the demo, and return the exit status."""
    options = _parser().parse_args(arguments)
    directory = (options.dir or BUILD / f"demo-{os.getpid()}").absolute()
    directory.mkdir(parents=True)
    os.environ.update(_scratch(directory))
    # Handle SIGTERM like Ctrl-C, so that every `finally` runs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = Plan(
        directory,
        options.shards,
        options.producers,
        options.readers,
        options.kills,
        options.limit,
        _picture(options),
    )
    try:
        with Progress(min(options.limit or FLIGHTS, FLIGHTS)) as progress:
            outcome = run(plan, progress)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BaseException:
        _save_log(directory)
        raise
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    report.write(options.out, outcome.verdict, outcome.speeds, outcome.facts)
    _print_outcome(outcome, options.out)
    return 0 if outcome.is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--dir", type=Path, help="directory to work in, made new (default: below build/)")
    parser.add_argument("--keep", action="store_true", help="leave that directory behind")
    parser.add_argument("--out", type=Path, default=BUILD / "demo.json", help="where the numbers go")
    parser.add_argument("--limit", type=int, help="only the first so many flights")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--producers", type=int, default=4, choices=range(1, 33), metavar="1..32")
    parser.add_argument("--readers", type=int, default=2, choices=range(1, 33), metavar="1..32")
    parser.add_argument("--spark", action="store_true", help="with the part with Spark, which needs Java")
    parser.add_argument(
        "--kills", type=int, default=3, help="SIGKILLs of shards on the way; with any, one of the scheduler"
    )
    return parser


def _picture(options: argparse.Namespace) -> Path | None:
    """Return the path for the picture of the Spark stage; None if the stage does not run."""
    if not options.spark:
        return None
    if missing_requirement := spark_stage.missing_requirement():
        print(f"Spark stage skipped: {missing_requirement}", file=sys.stderr)
        return None
    return Path(options.out).with_suffix(".png").absolute()


def _scratch(directory: Path) -> dict[str, str]:
    """Return variables that make Python, Spark and the JVM put temporary files below `directory`.

    Killed processes cannot remove their files. A JVM writes its counters to /tmp unless UsePerfData is
    off."""
    scratch = directory / "tmp"
    scratch.mkdir()
    java = f'{os.environ.get("JDK_JAVA_OPTIONS", "")} "-Djava.io.tmpdir={scratch}" -XX:-UsePerfData'
    return {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JDK_JAVA_OPTIONS": java.strip()}


def _save_log(directory: Path) -> None:
    """Copy the engine's log out of the directory after a failure."""
    log = directory / "engine.log"
    if log.exists():
        BUILD.mkdir(exist_ok=True)
        print(f"the engine's log: {shutil.copy(log, BUILD / 'demo-engine.log')}", file=sys.stderr)


def _print_outcome(outcome: Outcome, out: Path) -> None:
    verdict, live, facts = outcome.verdict, outcome.live, outcome.facts
    print(report.table(report.rows(verdict, outcome.speeds)))
    print(f"processes killed on the way: {len(facts['kills'])}; given to watchers: {live.read:,} records")
    print(report.copies_text(outcome.copies))
    print(report.stage_text(outcome.stage))
    if outcome.spark is not None:
        print(report.spark_text(outcome.spark))
    print(f"the same numbers: {out}")
    stage = outcome.stage
    named = {"after the restart": verdict, "live": live, "what is left": stage.verdict, "cold": stage.rest}
    for name, found in named.items():
        if not found.is_good:
            print(f"FAILED: {name}: {found}", file=sys.stderr)
    if not outcome.copies.is_good:
        print(f"FAILED: copies: {outcome.copies}", file=sys.stderr)
    if not stage.cold_segments:
        print("FAILED: no segment was relocated", file=sys.stderr)
    if outcome.spark is not None and not outcome.spark.is_good:
        print(f"FAILED: Spark: {outcome.spark}", file=sys.stderr)
    for failure in outcome.failures[:10]:
        print(f"NOT ACKED {failure}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
