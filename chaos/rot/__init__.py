"""Damage of data at rest (RF-70..RF-82, RF-123): bits, pages, frames, whole files, versions, copies.

An engine must detect every damage and name the file, or its answers must be unchanged. The offline verifier
must report the damage. docs/reference/format.md defines which bytes may have any value; see `is_meaningless`.

Settings: `bits` to flip in each byte (1; 8 = all), `cases_share` of the time for damage larger than a bit
(0.4), `bytes_max` bytes to flip at most (0 = no limit except time), `only` (list; run only these: "flips",
"last frames", and ids of matrix rows), `suffix` (damage only files whose names end with it).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.order import Account, Order
from chaos.processes import suppress_logging
from chaos.rot import atrest
from chaos.rot.answers import Answers, ask
from chaos.rot.bench import Bench
from chaos.rot.cases import Case, all_cases, kind_of, last_frames
from chaos.rot.compare import compare
from chaos.rot.specimen import Specimen, make_specimen
from chaos.rot.truncated import after_truncate
from ringlog.errors import CorruptData
from ringlog.limits import WAL_HEADER_BYTES

KNOWN: dict[str, Any] = {"bits": 1, "cases_share": 0.4, "bytes_max": 0, "only": [], "suffix": ""}
LAST_FRAME_STEP = 40
"""Step (bytes) between the flipped bytes of the last acknowledged frames."""
PATH_CHARS = 120
OF_THE_LOG = {".log", "snapshot", "log-"}
"""Kinds of files whose damage may need `wal.corruption = truncate` to start."""


def run(order: Order, account: Account) -> None:
    """Flip bits for most of the time, and apply larger damage for the rest."""
    settings = order.choose(KNOWN)
    with suppress_logging():  # otherwise each damage would log a warning
        _run(order, account, settings)


def _run(order: Order, account: Account, settings: dict[str, Any]) -> None:
    begun, only = time.monotonic(), settings["only"]
    bench = Bench(make_specimen(order.seed), order.scratch / "bench")
    _at_rest(order, account, bench, only)
    if not only or "last frames" in only:
        _last_frames(order, account)
    until = begun + order.seconds * float(settings["cases_share"] if "flips" in only or not only else 1.0)
    _large(order, account, bench, until, only, settings["suffix"])
    gc.collect()
    gc.freeze()  # without it, scanning the long-lived objects for each flip takes half of the time
    if not only or "flips" in only:
        _flips(order, account, bench, settings, begun + order.seconds)
    account.count_work("engine_starts", len(bench.asked))
    bench.close()


# -- bits ------------------------------------------------------------------------------------------------


def _flips(order: Order, account: Account, bench: Bench, settings: dict[str, Any], until: float) -> None:
    flips = list(places(bench.specimen, order.random("flips"), settings["bits"]))
    flips = [each for each in flips if each[0].endswith(settings["suffix"])]
    most = settings["bytes_max"] or len(flips)
    for path, at, bit in flips[:most]:
        if time.monotonic() > until or order.is_enough(account.counts):
            break
        wrong, is_inside = flip(bench, path, at, bit)
        account.count_work("bytes_flipped", 1, "RF-70", *(["RF-71"] if is_inside else []))
        if wrong:
            account.report_finding(wrong[:600], f"{order.seed}:flip:{path}:{at}:{bit}")


def places(specimen: Specimen, rng: random.Random, bits: int) -> Iterator[tuple[str, int, int]]:
    """Yield (path, offset, bit) of every byte in random order. An early end therefore covers all files."""
    found = [(path, at) for path, data in specimen.files.items() for at in range(len(data))]
    rng.shuffle(found)
    for path, at in found:
        for bit in range(8) if bits == 8 else [rng.randrange(8)]:
            yield path, at, bit


def flip(bench: Bench, path: str, at: int, bit: int) -> tuple[str, bool]:
    """Flip one bit; describe the problem, and return whether acknowledged frames follow the bit in a log."""
    data = bench.specimen.files[path]
    damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    verdict = bench.judge(path, damaged, at=at, is_meaningless=is_meaningless(bench.specimen, path, at))
    end = len(data.rstrip(b"\0"))
    return verdict.wrong, path.endswith(".log") and WAL_HEADER_BYTES <= at < end - PATH_CHARS


def is_meaningless(specimen: Specimen, path: str, at: int) -> bool:
    """Return whether docs/reference/format.md permits any value at this offset, or requires a remark only.

    Both apply to a log file that was allocated in advance and never used: it has no valid header and no
    commit batch. Every other byte is covered by a checksum, is compared with another place, or must be 0.
    """
    return path.endswith(".log") and not specimen.files[path].strip(b"\0")


# -- larger damage ---------------------------------------------------------------------------------------


def _large(order: Order, account: Account, bench: Bench, until: float, only: list[str], suffix: str) -> None:
    """Run at least one case for each row and kind of file, then further cases in random order."""
    cases = [case for case in all_cases(bench.specimen) if not only or case.row in only]
    cases = [case for case in cases if any(path.endswith(suffix) for path in case.damaged)]
    order.random("cases").shuffle(cases)
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(f"{case.row} {kind_of(min(case.damaged))}", case)
    chosen = {case.name: case for case in first.values()}
    for case in [*chosen.values(), *(each for each in cases if each.name not in chosen)]:
        is_over = time.monotonic() > until or order.is_enough(account.counts, "cases")
        if is_over and case.name not in chosen:
            break
        wrong = judge_case(bench, case, account)
        account.count_work("cases", 1, case.row)
        if wrong:
            account.report_finding(
                f"{case.row} {case.name}: {wrong}"[:600], f"{order.seed}:case:{case.row}:{case.name}"
            )


def judge_case(bench: Bench, case: Case, account: Account) -> str:
    """Run one case; return a description of the problem, or an empty string."""
    # If the damage includes the last mark of a stream, no other file states how far the stream reached.
    if not case.reaches_end and any(kind_of(path) in OF_THE_LOG for path in case.damaged):
        account.count_work("truncations", 1, "RF-123")
        if wrong := after_truncate(bench.specimen, case.files):
            return f"with truncate: {wrong}"
    if not case.reaches_end:
        return bench.judge_all(
            case.files, set(case.damaged), is_quiet=case.is_quiet, is_kept=case.is_kept, is_loss=case.is_loss
        )
    # The damage includes the last mark of the stream. While the kernel lives, the board has the position.
    # After a reboot the remaining records must be a prefix of the original ones.
    wrong = bench.judge_all(case.files, set(case.damaged), keeps_board=True, is_quiet=True)
    if wrong:
        return f"with the board: {wrong}"
    account.count_work("stream_ends", 1)
    return bench.judge_end(case.files, set(case.damaged))


def _last_frames(order: Order, account: Account) -> None:
    """Flip bits in the last acknowledged frames.

    No mark follows them; only the board has their end (RF-72).
    """
    specimen = make_specimen(order.seed, is_marked=False)
    truth = ask(specimen, specimen.files, keeps_board=True)
    for path, (start, stop) in last_frames(specimen).items():
        for at in range(start, stop, LAST_FRAME_STEP):
            wrong = last_frame(specimen, path, at, truth)
            account.count_work("cases", 1, "RF-72")
            if wrong:
                account.report_finding(f"RF-72 {path} at {at}: {wrong}", f"{order.seed}:last:{path}:{at}")
    assert truth.refused is None, truth.refused


def last_frame(specimen: Specimen, path: str, at: int, truth: Answers) -> str:
    """Flip a bit at this offset and let a successor of the shard recover; describe the problem.

    `truth` has the answers for the undamaged files.
    """
    data = specimen.files[path]
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    found = ask(specimen, {**specimen.files, path: damaged}, keeps_board=True)
    if not isinstance(found.refused, CorruptData):
        return "damage in an acknowledged frame is not refused"
    return compare(truth, found, {path})


# -- copies ----------------------------------------------------------------------------------------------


def _at_rest(order: Order, account: Account, bench: Bench, only: list[str]) -> None:
    for row, name, case in atrest.cases():
        if only and row not in only:
            continue
        wrong = case()
        account.count_work("cases", 1, row)
        if wrong:
            account.report_finding(f"{row} {name}: {wrong}", f"{order.seed}:rest:{row}:{name}")
    if only and "RF-80" not in only:
        return
    wrong = atrest.backed_up(bench.specimen, {}, order.scratch)
    assert not wrong, wrong
    for path in [each for each in bench.specimen.files if each.endswith(".data") and "/data/" in each][:2]:
        wrong = _backup(bench, path, order.scratch)
        account.count_work("cases", 1, "RF-80")
        if wrong:
            account.report_finding(f"RF-80 backup of {path}: {wrong}", f"{order.seed}:backup:{path}")


def _backup(bench: Bench, path: str, scratch: Path) -> str:
    data = bench.specimen.files[path]
    damaged = data[:5_000] + bytes([data[5_000] ^ 1]) + data[5_001:]
    return atrest.backed_up(bench.specimen, {path: damaged}, scratch)


def replay(order: Order, case: str) -> None:
    """Run one case again, given as in a finding: SEED:KIND:WHAT."""
    seed, kind, what = case.split(":", 2)
    with suppress_logging():
        bench = Bench(make_specimen(int(seed), is_marked=kind != "last"), order.scratch / "bench")
        wrong = _again(order, bench, kind, what)
    if wrong:
        raise AssertionError(wrong)


def _again(order: Order, bench: Bench, kind: str, what: str) -> str:
    if kind == "flip":
        path, at, bit = what.rsplit(":", 2)
        return flip(bench, path, int(at), int(bit))[0]
    if kind == "last":
        path, at = what.rsplit(":", 1)
        return last_frame(bench.specimen, path, int(at), bench.truth_on_board)
    if kind == "backup":
        return _backup(bench, what, order.scratch)
    row, name = what.split(":", 1)
    if kind == "rest":
        return next(
            case() for its_row, its_name, case in atrest.cases() if (its_row, its_name) == (row, name)
        )
    account = Account()
    found = next(each for each in all_cases(bench.specimen) if (each.row, each.name) == (row, name))
    return judge_case(bench, found, account)
