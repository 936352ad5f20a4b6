"""The catalogue of mutants stays valid: every patch applies and gives another program."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from chaos import mutants
from chaos.mutants import trial
from chaos.mutants.catalogue import Mutant, load_catalogue
from chaos.order import FINDINGS_MAX, Account, Order, WantedFindingReached
from chaos.plan import PlanError
from chaos.processes import private_tmpfs

ROOT = Path(__file__).parents[2]
CATALOGUE = load_catalogue()


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: str(mutant.number))
def test_a_mutant_applies_and_parses(mutant: Mutant, tmp_path: Path):
    path = tmp_path / mutant.file
    path.parent.mkdir(parents=True)
    source = (ROOT / mutant.file).read_text()
    path.write_text(source)
    mutant.apply(tmp_path)
    changed = path.read_text()
    assert changed != source
    if path.suffix == ".py":
        ast.parse(changed)
        assert not undefined_names(path), "it would be detected whatever it breaks"


def undefined_names(path: Path) -> str:
    """Return ruff's messages about undefined names in a file."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--quiet",
        "--select",
        "F821",
    ]
    return subprocess.run([*command, str(path)], capture_output=True, text=True, check=False).stdout


def test_an_undefined_name_is_found(tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text("print(no_such_name)\n")
    assert "no_such_name" in undefined_names(path)


def test_a_patch_that_does_not_apply_is_an_error(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    mutant = Mutant(number=99, what="none", file="a.py", old="y = 1", new="y = 2", by="states")
    with pytest.raises(PlanError, match=r"mutant 99: `old` must occur exactly once in a\.py, found 0 times"):
        mutant.apply(tmp_path)


def _tried(tmp_path: Path, mutant: Mutant) -> Account:
    account = Account()
    mutants._judge(mutant, trial.try_mutant(mutant, tmp_path, 1), account)
    return account


def test_a_mutant_is_detected_and_the_unchanged_program_passes(tmp_path: Path):
    mutant = next(each for each in CATALOGUE if each.number == 22)
    account = _tried(tmp_path, mutant)
    assert account.counts["caught"] == account.counts["mutants"] == 1
    assert account.findings == []
    control = Account()
    mutants._control([mutant, mutant], Order("mutants", 1, 1.0, tmp_path), control)
    assert control.counts["controls"] == 1
    assert control.findings == []


@pytest.mark.night
def test_an_undetected_mutant_and_a_broken_one_are_findings(tmp_path: Path):
    """One patch changes nothing, and the other one breaks the program at once."""
    path, by = "ringlog/board/seqlock.py", {"by": "schedules", "settings": {"only": ["seqlock"]}}
    old = "    before = words[at]\n"
    for number, new in enumerate((old + "\n", "    raise SystemError\n")):
        mutant = Mutant(number=number, what="none", file=path, old=old, new=new, seconds=5.0, **by)
        account = _tried(tmp_path, mutant)
        assert account.counts["mutants"] == 1
        assert account.counts["caught"] == 0
        assert [finding.case for finding in account.findings] == [str(number)]


@pytest.mark.night
def test_a_finding_of_another_kind_does_not_count_as_detection(tmp_path: Path):
    mutant = next(each for each in CATALOGUE if each.number == 22)
    account = _tried(tmp_path, msgspec.structs.replace(mutant, says="the head went back"))
    assert account.counts["caught"] == 0
    assert "does not say 'the head went back' but " in account.findings[0].what


def test_tests_do_not_see_the_shared_memory_of_parallel_classes(tmp_path: Path):
    """They once reported engines that a class had just killed, before the test that detects the mutant
    ran."""
    if not private_tmpfs("/dev/shm"):
        pytest.skip("mounts of one's own are not allowed here")
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_alone():\n    assert os.listdir('/dev/shm') == []\n"
    )
    mutant = msgspec.structs.replace(CATALOGUE[0], tests=("test_it.py",), limit_s=30.0)
    with tempfile.NamedTemporaryFile(dir="/dev/shm"):
        assert trial._by_tests(mutant, tmp_path, tmp_path, 1, is_changed=False).noticed == ""


def test_an_error_outside_of_a_test_does_not_count_and_is_reported(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("def test_it(nothing_like_it):\n    assert False\n")
    mutant = msgspec.structs.replace(CATALOGUE[0], tests=("test_it.py",), limit_s=30.0, says="")
    seen = trial._by_tests(mutant, tmp_path, tmp_path, 1, is_changed=True)
    assert (seen.noticed, seen.other) == ("", "ERROR test_it.py::test_it")


def test_the_wanted_finding_is_kept_after_many_others():
    account = Account(wanted="torn")
    for number in range(FINDINGS_MAX + 3):
        account.report_finding("something else", str(number))
    with pytest.raises(WantedFindingReached):
        account.report_finding("a torn word", "last")
    assert (account.findings[-1].what, account.findings_more) == ("a torn word", 3)


def test_the_wanted_finding_ends_its_class():
    account = Account(wanted="torn")
    account.report_finding("something else", "1")
    with pytest.raises(WantedFindingReached):
        account.report_finding("a torn word", "2")
    assert [finding.case for finding in account.findings] == ["1", "2"]


def test_the_catalogue_has_every_mutant_number():
    assert {mutant.number for mutant in CATALOGUE} == {*range(1, 49), *range(60, 119)}
