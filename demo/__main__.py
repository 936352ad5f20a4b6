"""`python -m demo`: run it, print the table, write build/demo.json; exit status 1 unless all is well."""

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
    """Read the command line, run the demo, judge."""
    options = _parser().parse_args(arguments)
    directory = (options.dir or BUILD / f"demo-{os.getpid()}").absolute()
    directory.mkdir(parents=True)
    os.environ.update(_scratch(directory))
    # SIGTERM ends like Ctrl-C: through every `finally`.
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
    _tell(outcome, options.out)
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
    """Where Spark's part leaves its picture; None if it is not to be played, or cannot be."""
    if not options.spark:
        return None
    if lacking := spark_stage.lacking():
        print(f"Spark's part is left out: {lacking}", file=sys.stderr)
        return None
    return Path(options.out).with_suffix(".png").absolute()


def _scratch(directory: Path) -> dict[str, str]:
    """Variables by which Python, Spark and JVM put temporary files below `directory`: who is killed, as some
    of ours are, cannot remove them, and a JVM keeps its counters in /tmp whatever it is told."""
    scratch = directory / "tmp"
    scratch.mkdir()
    java = f'{os.environ.get("JDK_JAVA_OPTIONS", "")} "-Djava.io.tmpdir={scratch}" -XX:-UsePerfData'
    return {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JDK_JAVA_OPTIONS": java.strip()}


def _save_log(directory: Path) -> None:
    """What the engine had to say outlives the directory when something went wrong."""
    log = directory / "engine.log"
    if log.exists():
        BUILD.mkdir(exist_ok=True)
        print(f"the engine's log: {shutil.copy(log, BUILD / 'demo-engine.log')}", file=sys.stderr)


def _tell(outcome: Outcome, out: Path) -> None:
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
            print(f"NOT WELL {name}: {found}", file=sys.stderr)
    if not outcome.copies.is_good:
        print(f"NOT WELL copied: {outcome.copies}", file=sys.stderr)
    if not stage.cold_segments:
        print("NOT WELL: nothing was relocated", file=sys.stderr)
    if outcome.spark is not None and not outcome.spark.is_good:
        print(f"NOT WELL in Spark: {outcome.spark}", file=sys.stderr)
    for failure in outcome.failures[:10]:
        print(f"NOT ACKED {failure}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
