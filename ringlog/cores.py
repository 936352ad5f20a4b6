"""Compiled cores: what compile_cores.py made of modules of engine and client, instead of their sources.

Taken is only what was compiled from exactly the sources that are there, for this interpreter; else all of
them run interpreted, which does the same, slower. RINGLOG_CORES=0 says not to, for profilers and debuggers,
and RINGLOG_CORES=actors that only the engine's processes do.

A compiled module bears no import that ends half way, by an exception of a signal or of another thread: mypyc
frees its classes then, and the process crashes, then or when it is imported again. So what programs import by
using a client is imported by a thread of its own: see `import_in_thread`.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType

# What only matters once there is something to import is imported then: `import ringlog` is cheap.

ROOT = Path(__file__).parent.parent
TARGET = Path(__file__).parent / "_cores"
VARIABLE = "RINGLOG_CORES"
ACTORS_ONLY = "actors"
"""Its value where only the engine's processes take them."""
_MANIFEST = "manifest.json"
_IMPORT_TIMEOUT_S = 30.0
"""How long an import in a thread of its own is waited for. Beyond, it may wait for one that we are in."""
_is_import_blocked = False
"""One was not done by then: a signal left an import's lock with us. From here on nobody waits."""
SUFFIX = EXTENSION_SUFFIXES[0]
"""Of libraries for just this interpreter."""


def install_finder() -> None:
    """Import compiled cores from here on, if they may be: `import ringlog` says so, before anything of ours.

    Whether they are of these sources is looked at when the first of them is imported: who only wants the
    version or an error's class does not wait for that. All or none: a compiled module believes no object of
    one that was imported from its source.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def disabled_reason() -> str:
    """Why modules are imported from their sources here; or nothing. From here on it is decided."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder.disabled_reason
    return "withdrawn"


def are_enabled() -> bool:
    """Do modules that are imported now come compiled?"""
    return not disabled_reason()


def _disabled_by_environment() -> str:
    """What the environment says against it; or nothing."""
    wish = os.environ.get(VARIABLE, "")
    if wish == "0" or (wish == ACTORS_ONLY and not is_actor_process()):
        return f"{VARIABLE}={wish}"
    return ""


def import_in_thread(name: str) -> None:
    """Have a module of ours imported by a thread of its own, for the caller to import it then: what
    interrupts him finds him waiting, and the import goes on to its end."""
    global _is_import_blocked  # noqa: PLW0603
    if name in sys.modules or _is_import_blocked or not are_enabled():
        return
    import threading

    done = threading.Lock()  # An Event breaks where a signal hits its wait.
    done.acquire()

    def load() -> None:
        try:
            importlib.import_module(name)
        except ImportError:
            return  # The caller meets it as well.
        finally:
            done.release()

    try:
        # No daemon: the interpreter does not end in the middle of it.
        threading.Thread(target=load, name="ringlog-import", daemon=False).start()
    except RuntimeError:
        return  # No thread can be started any more.
    _is_import_blocked = not done.acquire(timeout=_IMPORT_TIMEOUT_S)


def is_actor_process() -> bool:
    """Was this process started as one of the engine's?"""
    try:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    except (ValueError, IndexError):
        return False
    return module == "actors" or module.startswith("actors.")


def stale_reason(target: Path, root: Path) -> str:
    """Why what lies in `target` is not what would be compiled from the sources below `root`; or nothing."""
    import json

    try:
        manifest = json.loads((target / _MANIFEST).read_text())
        if manifest["suffix"] != SUFFIX:
            return "compiled for another Python"
        for file, wanted in manifest["sources"].items():
            if digest(root / file) != wanted:
                return f"{file} has changed since"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not compiled"
    return ""


def digest(file: Path) -> str:
    """What tells one version of a source from another."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(file.read_bytes())


class _Finder:
    """Finds what is compiled, ahead of its source."""

    def __init__(self) -> None:
        self._why_not: str | None = None
        self._files: dict[str, str] = {}

    @property
    def disabled_reason(self) -> str:
        """Why it finds nothing, or nothing. Decided once, when it is first asked."""
        if self._why_not is None:
            self._why_not = _disabled_by_environment() or stale_reason(TARGET, ROOT) or self._look()
        return self._why_not

    def _look(self) -> str:
        found = {
            ".".join(file.relative_to(TARGET).parts)[: -len(SUFFIX)]: str(file)
            for file in TARGET.rglob(f"*{SUFFIX}")
        }
        for name in found.keys() & sys.modules.keys():
            return f"{name} is imported already"
        self._files = found
        return ""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of ours, or nothing."""
        if not self._may_be(fullname) or self.disabled_reason:
            return None
        file = self._files.get(fullname)
        if file is None:
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))

    @staticmethod
    def _may_be(name: str) -> bool:
        """Modules that are worth deciding for: of a package of ours, or a library of compiled ones."""
        return name.startswith(("ringlog.", "actors.", "ringlog_")) and name != __name__
