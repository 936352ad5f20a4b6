"""`ringlog restore`: a data directory from a backup. A restore is checked before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ringlog.cli.copies import copy_file, differing, make_empty, read_manifest, renamed, sync_tree
from ringlog.cli.options import Options
from ringlog.errors import CorruptData

Given = Annotated[Options, Parameter(parse=False)]
COLD = "cold/"


def restore(backup: str, *, to: str, options: Given) -> int:
    """Check a backup against its manifest and copy it into a new data directory. A start then recovers it.

    Parameters
    ----------
    backup
        What `ringlog backup` made.
    to
        The data directory to make; new or empty.
    """
    source, target = Path(backup).absolute(), Path(to).absolute()
    manifest = read_manifest(source)
    wrong = differing(source, manifest.files)
    if wrong:
        raise CorruptData("the backup is damaged", file=wrong[0], files=len(wrong))
    make_empty(target)
    # Cold parts come back beside their indexes: the relocator moves them again when it is set up.
    for entry in manifest.files:
        copy_file(source / entry.path, target / entry.path.removeprefix(COLD))
    sync_tree(target)
    restored = [renamed(entry, entry.path.removeprefix(COLD)) for entry in manifest.files]
    broken = differing(target, restored)
    if broken:
        raise CorruptData("what was restored is not what was read", file=broken[0], files=len(broken))
    facts = {"restored": str(target), "files": len(restored), "bytes": manifest.total}
    options.printer().thing(facts | {"engine_id": manifest.engine_id})
    return 0
