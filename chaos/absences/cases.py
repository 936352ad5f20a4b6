"""What is away at one start, and with which settings that start is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chaos.rot.cases import kind_of
from chaos.rot.specimen import COLD, Specimen

SAME, MORE_SHARDS, FEWER_SHARDS, NO_COLD = "same settings", "more shards", "fewer shards", "no cold tier"
NEVER_COLD = "never a cold tier"
"""Nothing says that there was one: what is away was not moved."""
MODES = (SAME, MORE_SHARDS, FEWER_SHARDS, NO_COLD, NEVER_COLD)
SHARDS = {SAME: 2, MORE_SHARDS: 3, FEWER_SHARDS: 1, NO_COLD: 2, NEVER_COLD: 2}
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Case:
    """One start without one file, and how it is made."""

    path: str
    """The file that is away; NOTHING: only the settings are other ones."""
    mode: str

    @property
    def name(self) -> str:
        """For people, and to find it again."""
        return f"{self.mode}, without {self.path}"

    @property
    def kind(self) -> str:
        """What kind of file is away, and where it should be."""
        if self.path == NOTHING:
            return NOTHING
        return f"{kind_of(self.path)} {'cold' if self.path.startswith(COLD) else 'hot'}"

    @property
    def fault(self) -> str:
        """Its row of the fault matrix."""
        return "RF-121" if self.mode in {SAME, NEVER_COLD} else "RF-122"

    def away(self, specimen: Specimen) -> set[str]:
        """Paths that are not there at this start."""
        cold = {path for path in specimen.files if path.startswith(COLD)} if self.mode == NO_COLD else set()
        return {self.path, *cold} - {NOTHING}


def all_cases(specimen: Specimen) -> Iterator[Case]:
    """Every file with every mode, and every mode by itself. The identity is the supervisor's business."""
    paths = [path for path in specimen.files if not path.endswith("/engine")]
    for mode in MODES:
        yield Case(NOTHING, mode)
        for path in paths:
            # An older snapshot lists the segment that was moved since as one of the host's.
            is_cold = path.startswith(COLD) or (mode == NEVER_COLD and "/snapshot-" in path)
            if not is_cold or mode not in {NO_COLD, NEVER_COLD}:
                yield Case(path, mode)
