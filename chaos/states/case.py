"""The name of one image: history, cut, kind of crash, key; enough to make and judge it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from chaos.order import Broken
from chaos.rigs.judge import KILL, KILL_SHARD, POWER_LOSS

TRAP = "failed sync"
HOWS = {how.name: how for how in (KILL, KILL_SHARD, POWER_LOSS)}


@dataclass(frozen=True, slots=True)
class Case:
    """A cut of a history."""

    steps: tuple[str, ...]
    cut: int
    """Number of the last operation that was done, notes counted."""

    def text(self, how: str, key: bytes, *again: object) -> str:
        """`STEP+STEP@CUT:KIND:KEY`, and behind it `:CALL:KEY` of a crash inside the recovery."""
        more = "".join(f":{each.hex() if isinstance(each, bytes) else each}" for each in again)
        return f"{'+'.join(self.steps)}@{self.cut}:{how}:{key.hex()}{more}"

    @contextmanager
    def named(self, how: str, key: bytes, *again: object) -> Iterator[None]:
        """Let what breaks here carry this name."""
        try:
            yield
        except Broken as e:
            case = self.text(how, key, *again)
            raise Broken(f"{case}: {e}", case=case) from e


def parse(text: str) -> tuple[Case, str, bytes, tuple[int, bytes] | None]:
    """(cut of a history, kind of crash, key, (call of the recovery, key) or None); raises ValueError."""
    steps, at, rest = text.partition("@")
    parts = rest.split(":")
    if not at or len(parts) not in (3, 5) or parts[1] not in {*HOWS, TRAP}:
        raise ValueError(f"not a case of this class: {text}")
    again = (int(parts[3]), bytes.fromhex(parts[4])) if len(parts) == 5 else None
    return Case(tuple(steps.split("+")), int(parts[0])), parts[1], bytes.fromhex(parts[2]), again
