"""Compiled cores: what compile_cores.py made of the engine's pure modules, instead of their sources.

A process of the engine says `use()` before it imports any of them. Taken is only what was compiled from
exactly the sources that are there, for this interpreter; else all of them run interpreted, which does the
same, slower. RINGLOG_CORES=0 says not to, for profilers and debuggers.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import xxhash

ROOT = Path(__file__).parent.parent
TARGET = Path(__file__).parent / "_cores"
_VARIABLE = "RINGLOG_CORES"
_MANIFEST = "manifest.json"


def use() -> str:
    """Import compiled cores from here on; returns why not, or nothing. Idempotent.

    All or none: a compiled module believes no object of one that was imported from its source before.
    """
    if are_used():
        return ""
    why = f"{_VARIABLE}=0" if os.environ.get(_VARIABLE) == "0" else why_not(TARGET, ROOT)
    if why:
        return why
    finder = _Finder(TARGET)
    for name in finder.names & sys.modules.keys():
        return f"{name} is imported already"
    sys.meta_path.insert(0, finder)
    return ""


def is_actor() -> bool:
    """Was this process started as one of the engine's?"""
    try:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    except (ValueError, IndexError):
        return False
    return module == "actors" or module.startswith("actors.")


def are_used() -> bool:
    """Do modules that are imported now come compiled?"""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def why_not(target: Path, root: Path) -> str:
    """Why what lies in `target` is not what would be compiled from the sources below `root`; or nothing."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text())
        if manifest["suffix"] != sysconfig.get_config_var("EXT_SUFFIX"):
            return "compiled for another Python"
        for file, wanted in manifest["sources"].items():
            if digest(root / file) != wanted:
                return f"{file} has changed since"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not compiled"
    return ""


def digest(file: Path) -> str:
    """What tells one version of a source from another."""
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


class _Finder(MetaPathFinder):
    """Finds what is compiled, ahead of its source."""

    def __init__(self, target: Path) -> None:
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        self._files = {
            ".".join(file.relative_to(target).parts)[: -len(suffix)]: str(file)
            for file in target.rglob(f"*{suffix}")
        }

    @property
    def names(self) -> set[str]:
        """Modules that it finds."""
        return set(self._files)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of ours, or nothing."""
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))
