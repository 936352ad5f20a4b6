"""Repeats one case by its name and prints its operations."""

from __future__ import annotations

from pathlib import Path

from chaos.rigs.judge import POWER_LOSS, CrashKind
from chaos.states.explore import HOWS, TRAP, cases, cuts_of, parse, record, recovery_of
from chaos.states.images import Image, Tree
from chaos.states.judge import Depth, judge, judge_trap
from chaos.states.offline import Offline
from chaos.states.workload import History
from ringlog.testing import disk as d

NOTHING = "no image of this case has that key; has the history changed since?"
SHOWN_BYTES_MAX = 60
"""Maximum number of bytes of a write that are printed."""


def replay_state(text: str, scratch: Path) -> None:
    """Judge the image of a case with the offline verifier, and with all frames sent again.

    Raises GuaranteeBroken, or ValueError if the case does not exist.
    """
    case, how_name, key, again = parse(text)
    history, tree = record(case.steps)
    facts = next((facts for number, facts in cuts_of(history, tree) if number == case.cut), None)
    if facts is None:
        raise ValueError(f"the history has {len(history.operations)} operations")
    _tell(history, case.cut)
    offline = Offline(scratch)
    if how_name == TRAP:
        judge_trap(tree.as_synced(), tree.as_killed(), facts)
        return
    image = _find(tree, case.cut, HOWS[how_name], key)
    for path, data in sorted(image.files.items()):
        print(f"  {path}: {len(data)} bytes, {len(data.rstrip(bytes(1)))} up to the zeros at its end")
    if again is None:
        judge(image, facts, HOWS[how_name], depth=Depth(offline, goes_on=True))
        return
    call, inner = again
    judge(_within_recovery(image, HOWS[how_name], call, inner), facts, POWER_LOSS, 2_000, Depth(offline))


def _find(tree: Tree, seed: int, wanted: CrashKind, key: bytes) -> Image:
    for image, how in cases(tree, seed):
        if how is wanted and image.key() == key:
            return image
    raise ValueError(NOTHING)


def _within_recovery(image: Image, how: CrashKind, call: int, key: bytes) -> Image:
    tree = Tree.of(image)
    operations = recovery_of(image, how)
    for operation in operations[: call + 1]:
        tree.do(operation)
    for number, operation in enumerate(operations[: call + 1]):
        print(f"  recovery {number}: {_line(operation)}")
    return _find(tree, call, POWER_LOSS, key)


def _tell(history: History, cut: int) -> None:
    for number, operation in enumerate(history.operations[: cut + 1]):
        print(f"{number:4} {_line(operation)}")


def _line(operation: d.Operation) -> str:
    if isinstance(operation, d.Write):
        shown = operation.data[:SHOWN_BYTES_MAX]
        return f"Write {operation.path} at {operation.offset}, {len(operation.data)} bytes: {shown!r}"
    return f"{operation}"
