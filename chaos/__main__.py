"""`python -m chaos`: inject faults into ringlog and check its guarantees.

python -m chaos run [--plan ci] [CLASS ...]   run a plan, or some of its classes
python -m chaos replay CLASS CASE             repeat one case; every finding prints this command
python -m chaos doctor                        show what this host supports
python -m chaos list [--plan ci]              list classes, times and minimum counts
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import msgspec

from chaos import doctor, record
from chaos.order import Account, CannotRun, FaultClass, Order, WantedFindingReached
from chaos.plan import PlanError, load_faults, load_plan
from chaos.run import NEVER_STARTED, ROOT, run_plan
from ringlog.drill.nursery import die_with

INTERRUPTED = 130


def load_class(name: str) -> FaultClass:
    """Import and return the package of a fault class.

    Raises PlanError if it is missing or lacks `run` or `replay`.
    """
    try:
        module = importlib.import_module(f"chaos.{name}")
    except ModuleNotFoundError as e:
        raise PlanError(f"unknown class {name}: {e}") from e
    if not hasattr(module, "run") or not hasattr(module, "replay"):
        raise PlanError(f"chaos.{name} is not a fault class: it must define run and replay")
    return module


def _run(args: argparse.Namespace) -> int:
    plan, faults = load_plan(args.plan), load_faults()
    unknown = sorted(set(args.classes) - set(plan.by_name))
    if unknown:
        raise PlanError(
            f"plan {plan.name} has no class {', '.join(unknown)}; it has {', '.join(plan.by_name)}"
        )
    if args.work and not Path(args.work).is_dir():
        raise PlanError(f"--work must be an existing directory, got {args.work}")
    out = Path(args.out) if args.out else ROOT / "build" / f"chaos-{plan.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    passes = 0
    while plan.passes == 0 or passes < plan.passes:
        with tempfile.TemporaryDirectory(prefix="ringlog-chaos-", dir=args.work) as work:
            keep = record.record if args.record else None
            report = run_plan(plan, faults, args.classes, Path(work), pass_number=passes, keep=keep)
        passes += 1
        out.write_bytes(report.to_json())
        if args.record:
            print(
                "recorded:",
                ", ".join(record.record(report))
                or "nothing (only classes that passed, and from a committed tree)",
            )
            record.write_page()
        skips = [(v.name, skip) for v in report.verdicts for skip in v.account.skipped]
        for name, skip in skips:
            print(f"skipped in {name}: {skip.what}: {skip.why}")
        # Repeat the failures at the very end, because often only the end of a long output is kept.
        for verdict in report.verdicts:
            for wrong in verdict.wrong:
                print(f"FAILED {verdict.name}: {wrong}")
        for wrong in report.wrong:
            print(f"FAILED: {wrong}")
        bad = sum(bool(verdict.wrong) for verdict in report.verdicts)
        print(
            f"{len(report.verdicts) - bad} classes passed, {bad} failed, {len(skips)} things skipped,"
            f" {report.seconds:.0f} s; {out}"
        )
        if not report.is_good:
            return 1
    return 0


def _class(args: argparse.Namespace) -> int:
    raw = msgspec.json.decode(Path(args.order).read_bytes())
    # If the runner is killed, this process must die too. Otherwise the class would keep running for up to an
    # hour and disturb the next run.
    die_with(raw["parent"])
    order = Order(
        raw["name"], raw["seed"], raw["seconds"], Path(raw["scratch"]), raw["settings"], raw["floors"]
    )  # fmt: skip
    account = Account(wanted=raw["wanted"])
    code = 0
    try:
        load_class(order.name).run(order, account)
    except WantedFindingReached:
        code = 0
    except CannotRun as e:
        account.skip(order.name, str(e))
        code = NEVER_STARTED
    finally:
        Path(raw["account"]).write_bytes(account.to_json())
    return code


def _replay(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="ringlog-chaos-") as scratch:
        order = Order(args.name, args.seed, args.seconds, Path(scratch))
        load_class(args.name).replay(order, args.case)
    print("held")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    return doctor.main(clean=args.clean)


def _list(args: argparse.Namespace) -> int:
    for entry in load_plan(args.plan).entries:
        floors = ", ".join(f"{number:,} {what}" for what, number in entry.floors.items())
        print(f"{entry.target:5} lane {entry.lane} {entry.name:12} {entry.seconds:6.0f} s  at least {floors}")
    return 0


def main() -> int:
    """Run the command line.

    Returns 0 if everything held, 1 if something failed, 2 for an invalid request, 130 after an interrupt.
    """
    parser = argparse.ArgumentParser(
        "chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a plan, or some of its classes")
    run.add_argument("classes", nargs="*")
    run.add_argument("--plan", default="ci")
    run.add_argument("--out", help="report file (default: build/chaos-PLAN.json)")
    run.add_argument("--record", action="store_true", help="record the results in chaos/results")
    run.add_argument("--work", help="directory on a real disk for scratch files")
    run.set_defaults(call=_run)
    one = commands.add_parser("class", help="run one class from an order file (internal)")
    one.add_argument("order")
    one.set_defaults(call=_class)
    again = commands.add_parser("replay", help="repeat one case of a finding")
    again.add_argument("name")
    again.add_argument("case")
    again.add_argument("--seed", type=int, default=1)
    again.add_argument("--seconds", type=float, default=60.0)
    again.set_defaults(call=_replay)
    look = commands.add_parser("doctor", help="show which fault mechanisms work on this host")
    look.add_argument("--clean", action="store_true", help="remove leftovers of an interrupted run")
    look.set_defaults(call=_doctor)
    show = commands.add_parser("list", help="list the classes of a plan")
    show.add_argument("--plan", default="ci")
    show.set_defaults(call=_list)
    args = parser.parse_args()
    try:
        return int(args.call(args))
    except KeyboardInterrupt:
        print(
            "interrupted: running classes were killed; with --record, classes that had passed are recorded",
            file=sys.stderr,
        )
        return INTERRUPTED
    except PlanError as e:
        print(e, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
