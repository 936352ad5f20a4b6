"""Leftovers of a segment whose writing or removal crashed are no damage, and a lost segment is."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.states.explore import cuts_of, record
from chaos.states.images import Image
from ringlog.testing import disk as d
from ringlog.verify.directory import Verification, verify_directory


def verified(image: Image, root: Path) -> Verification:
    for path, data in image.files.items():
        target = root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (root / "cold").mkdir(exist_ok=True)
    return verify_directory(str(root / "data"), is_deep=True, jobs=1, cold_dir=str(root / "cold"))


def killed_after(kind: type[d.Operation], suffix: str, *steps: str) -> Image:
    """Return the disk of an engine that was killed right after the first call of this kind."""
    history, tree = record(steps)
    for number, _ in cuts_of(history, tree):
        done = history.operations[number]
        name = getattr(done, "target", getattr(done, "path", ""))
        if isinstance(done, kind) and name.endswith(suffix):
            return tree.as_killed()
    raise AssertionError(f"no {kind.__name__} of {suffix}")


@pytest.mark.parametrize("suffix", [".idx", ".tags"])
def test_an_index_named_before_its_data_is_a_leftover(tmp_path, suffix):
    """The compactor was killed between two renames, and the log still has the records."""
    found = verified(killed_after(d.Rename, suffix, "append_many", "seal"), tmp_path)
    assert not found.is_damaged, found.findings
    assert any("is not a segment" in each.what for each in found.findings)
    assert [(each.topic, each.records) for each in found.topics if each.topic == "f"] == [("f", 4)]


@pytest.mark.parametrize(
    ("suffix", "steps"),
    [(".data", ("reclaim",)), (".tags", ("reclaim",)),
     (".tags", ("relocate", "append", "reclaim"))],
)  # fmt: skip
def test_an_index_whose_data_was_removed_first_is_a_leftover(tmp_path, suffix, steps):
    """The reclaimer was killed during the removal of a segment that no shard lists. It removes a cold copy
    last."""
    found = verified(killed_after(d.Unlink, suffix, *steps), tmp_path)
    assert not found.is_damaged, found.findings


def test_a_leftover_index_does_not_prove_records(tmp_path):
    """Its records do not exist. If the log is missing too, the records are lost."""
    image = killed_after(d.Rename, ".idx", "delete_seq", "seal")
    logs = [path for path in image.files if path.endswith("wal-1-0.log")]
    left = {path: data for path, data in image.files.items() if path not in logs}
    found = verified(Image(image.directories, left), tmp_path)
    assert not [each for each in found.topics if each.records]
