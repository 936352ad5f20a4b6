"""Bytes at rest that change (T-12): one bit of every byte of a directory, pages, files, versions, copies.

Every damage must be detected, with the file's name, or change no answer; and the offline verifier must report
it. What nobody has to notice is decided by docs/reference/format.md, not by trying: see `is_meaningless`.

Settings: `bits` of each byte (1; 8 = all), `cases_share` of the time for damage larger than a bit (0.4),
`bytes_max` to flip at most (0 = as many as there is time for); `only`: "flips", "last frames" and rows of the
matrix, and nothing else; `suffix`: flips and larger damage only of files whose names end so.
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
"""Of the last acknowledged frames each so many-th byte is flipped."""
PATH_CHARS = 120
OF_THE_LOG = {".log", "snapshot", "log-"}
"""Kinds of files without which a start needs `wal.corruption = truncate`."""


def run(order: Order, account: Account) -> None:
    """Flip bits for most of the time, and make larger damage for the rest."""
    settings = order.choose(KNOWN)
    with suppress_logging():  # a warning for each damage helps nobody
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
    gc.freeze()  # what is there stays; to look through it again for each flip takes half of the time
    if not only or "flips" in only:
        _flips(order, account, bench, settings, begun + order.seconds)
    account.did("engine_starts", len(bench.asked))
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
        account.did("bytes_flipped", 1, "RF-70", *(["RF-71"] if is_inside else []))
        if wrong:
            account.found(wrong[:600], f"{order.seed}:flip:{path}:{at}:{bit}")


def places(specimen: Specimen, rng: random.Random, bits: int) -> Iterator[tuple[str, int, int]]:
    """(path, offset, bit) of every byte, in an order of chance: wherever it stops, all files had a share."""
    found = [(path, at) for path, data in specimen.files.items() for at in range(len(data))]
    rng.shuffle(found)
    for path, at in found:
        for bit in range(8) if bits == 8 else [rng.randrange(8)]:
            yield path, at, bit


def flip(bench: Bench, path: str, at: int, bit: int) -> tuple[str, bool]:
    """(what was wrong, whether frames that were acknowledged lie behind it)."""
    data = bench.specimen.files[path]
    damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    verdict = bench.judge(path, damaged, at=at, is_meaningless=is_meaningless(bench.specimen, path, at))
    end = len(data.rstrip(b"\0"))
    return verdict.wrong, path.endswith(".log") and WAL_HEADER_BYTES <= at < end - PATH_CHARS


def is_meaningless(specimen: Specimen, path: str, at: int) -> bool:
    """Does docs/reference/format.md say that a byte there may be anything, or that only a remark is due?

    It says so of a log file that was made ahead of need: without a header that verifies and without a group
    it was never used. Every other byte is covered by a checksum, is held against another place, or must be 0.
    """
    return path.endswith(".log") and not specimen.files[path].strip(b"\0")


# -- larger damage ---------------------------------------------------------------------------------------


def _large(order: Order, account: Account, bench: Bench, until: float, only: list[str], suffix: str) -> None:
    """At least one case of each row, then as many as there is time for, in an order of chance."""
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
        account.did("cases", 1, case.row)
        if wrong:
            account.found(
                f"{case.row} {case.name}: {wrong}"[:600], f"{order.seed}:case:{case.row}:{case.name}"
            )


def judge_case(bench: Bench, case: Case, account: Account) -> str:
    """What was wrong; empty when every promise held."""
    # Where the end of a stream is gone with what spoke of it, nobody knows what was there.
    if not case.reaches_end and any(kind_of(path) in OF_THE_LOG for path in case.damaged):
        account.did("truncations", 1, "RF-123")
        if wrong := after_truncate(bench.specimen, case.files):
            return f"with truncate: {wrong}"
    if not case.reaches_end:
        return bench.judge_all(
            case.files, set(case.damaged), is_quiet=case.is_quiet, is_kept=case.is_kept, is_loss=case.is_loss
        )
    # Together with the end of a stream its last mark is gone. The board knows, while the kernel lives; after
    # a reboot what is left must be a beginning of what there was.
    wrong = bench.judge_all(case.files, set(case.damaged), keeps_board=True, is_quiet=True)
    if wrong:
        return f"with the board: {wrong}"
    account.did("stream_ends", 1)
    return bench.judge_end(case.files, set(case.damaged))


def _last_frames(order: Order, account: Account) -> None:
    """RF-72: no mark stands behind the last acknowledged frames; the board alone knows how far they reach."""
    specimen = make_specimen(order.seed, is_marked=False)
    truth = ask(specimen, specimen.files, keeps_board=True)
    for path, (start, stop) in last_frames(specimen).items():
        for at in range(start, stop, LAST_FRAME_STEP):
            wrong = last_frame(specimen, path, at, truth)
            account.did("cases", 1, "RF-72")
            if wrong:
                account.found(f"RF-72 {path} at {at}: {wrong}", f"{order.seed}:last:{path}:{at}")
    assert truth.refused is None, truth.refused


def last_frame(specimen: Specimen, path: str, at: int, truth: Answers) -> str:
    """Flip a bit there and let a successor of the shard recover; `truth` is what it says of a sound one."""
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
        account.did("cases", 1, row)
        if wrong:
            account.found(f"{row} {name}: {wrong}", f"{order.seed}:rest:{row}:{name}")
    if only and "RF-80" not in only:
        return
    wrong = atrest.backed_up(bench.specimen, {}, order.scratch)
    assert not wrong, wrong
    for path in [each for each in bench.specimen.files if each.endswith(".data") and "/data/" in each][:2]:
        wrong = _backup(bench, path, order.scratch)
        account.did("cases", 1, "RF-80")
        if wrong:
            account.found(f"RF-80 backup of {path}: {wrong}", f"{order.seed}:backup:{path}")


def _backup(bench: Bench, path: str, scratch: Path) -> str:
    data = bench.specimen.files[path]
    damaged = data[:5_000] + bytes([data[5_000] ^ 1]) + data[5_001:]
    return atrest.backed_up(bench.specimen, {path: damaged}, scratch)


def replay(order: Order, case: str) -> None:
    """One case again: SEED:KIND:WHAT, as a finding names it."""
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
