"""Compiled modules: the output of compile_cores.py replaces some modules of engine and client.

Compiled modules are used only if they were compiled from exactly the installed sources and for this
interpreter. Otherwise all modules run interpreted, with the same behaviour and slower. RINGLOG_CORES=0
disables them, for profilers and debuggers. RINGLOG_CORES=actors uses them in the engine's processes only.

The import of a compiled module must never be interrupted, neither by a signal handler's exception nor by one
from another thread. mypyc would free the module's classes, and the process would crash, at once or at the
next import. Client modules are therefore imported in a separate thread: see `import_in_thread`.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType

# Modules that are needed only if compiled modules exist are imported late: `import ringlog` must be fast.

ROOT = Path(__file__).parent.parent
TARGET = Path(__file__).parent / "_cores"
VARIABLE = "RINGLOG_CORES"
ACTORS_ONLY = "actors"
"""Value of the variable that uses compiled modules in the engine's processes only."""
_MANIFEST = "manifest.json"
_IMPORT_TIMEOUT_S = 30.0
"""Longest wait (s) for an import in a separate thread. After it, that may be waiting for this thread."""
_is_import_blocked = False
"""Such a wait timed out: a signal handler interrupted an import of this thread. Later imports do not wait."""
SUFFIX = EXTENSION_SUFFIXES[0]
"""File suffix of extension modules for this interpreter."""


def install_finder() -> None:
    """Import compiled modules from now on, if they may be used. `import ringlog` calls it first.

    The check of the sources is delayed until the first of these modules is imported, so that a program that
    only reads the version does not wait for it. All modules or none are used compiled, because a compiled
    module rejects objects of an interpreted one.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def disabled_reason() -> str:
    """Return why modules are imported from their sources; empty if they are compiled. Makes the decision."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder.disabled_reason
    return "withdrawn"


def are_enabled() -> bool:
    """Return whether modules that are imported now are compiled."""
    return not disabled_reason()


def _disabled_by_environment() -> str:
    """Return the environment setting that disables compiled modules; empty if there is none."""
    wish = os.environ.get(VARIABLE, "")
    if wish == "0" or (wish == ACTORS_ONLY and not is_actor_process()):
        return f"{VARIABLE}={wish}"
    return ""


def import_in_thread(name: str) -> None:
    """Import a module of ringlog in a separate thread, so that the caller's own import finds it.

    A signal handler can interrupt only the caller's wait. The import itself runs to its end.
    """
    global _is_import_blocked  # noqa: PLW0603
    if name in sys.modules or _is_import_blocked or not are_enabled():
        return
    import threading

    done = threading.Lock()  # Not an Event: a signal during its wait can leave it broken.
    done.acquire()

    def load() -> None:
        try:
            importlib.import_module(name)
        except ImportError:
            return  # The caller's own import raises it as well.
        finally:
            done.release()

    try:
        # Not a daemon: the interpreter must not exit during the import.
        threading.Thread(target=load, name="ringlog-import", daemon=False).start()
    except RuntimeError:
        return  # The interpreter shuts down and starts no more threads.
    _is_import_blocked = not done.acquire(timeout=_IMPORT_TIMEOUT_S)


def is_actor_process() -> bool:
    """Return whether this process was started as an actor or fork server of the engine."""
    try:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    except (ValueError, IndexError):
        return False
    return module == "actors" or module.startswith("actors.")


def stale_reason(target: Path, root: Path) -> str:
    """Return why the files in `target` do not match the sources below `root`; empty if they match."""
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
    """Return a hash that identifies the version of a source file."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(file.read_bytes())


class _Finder:
    """Import finder that returns compiled modules before their sources."""

    def __init__(self) -> None:
        self._why_not: str | None = None
        self._files: dict[str, str] = {}

    @property
    def disabled_reason(self) -> str:
        """Why the finder returns no compiled modules; empty if it does. Decided at the first access."""
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
        """Return the spec of a compiled module, or None."""
        if not self._may_be(fullname) or self.disabled_reason:
            return None
        file = self._files.get(fullname)
        if file is None:
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))

    @staticmethod
    def _may_be(name: str) -> bool:
        """Return whether a name justifies the decision: ringlog's packages, and mypyc's shared libraries."""
        return name.startswith(("ringlog.", "actors.", "ringlog_")) and name != __name__
