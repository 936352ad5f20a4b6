"""The list of deliberate bugs stays true: every one can still be made, and is another program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from chaos.mutants.catalogue import Mutant, load_catalogue
from chaos.plan import PlanError

ROOT = Path(__file__).parents[2]
CATALOGUE = load_catalogue()


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: str(mutant.number))
def test_a_mutant_can_be_made_and_is_a_program(mutant: Mutant, tmp_path: Path):
    path = tmp_path / mutant.file
    path.parent.mkdir(parents=True)
    source = (ROOT / mutant.file).read_text()
    path.write_text(source)
    mutant.apply(tmp_path)
    changed = path.read_text()
    assert changed != source
    if path.suffix == ".py":
        ast.parse(changed)


def test_a_place_that_moved_is_said(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    mutant = Mutant(number=99, what="none", file="a.py", old="y = 1", new="y = 2", by="states")
    with pytest.raises(PlanError, match="mutant 99: its text stands 0 times"):
        mutant.apply(tmp_path)
