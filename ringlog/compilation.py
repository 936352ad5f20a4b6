"""Whether this installation runs modules that mypyc compiled, and imports that no exception can interrupt.

A wheel has compiled modules beside their sources; a checkout runs the sources.

mypyc frees the classes of a module whose import was interrupted halfway, by the exception of a signal handler
or of another thread. The process then crashes, immediately or at the next import. A program imports parts of
the client when it first uses them, so these imports run in a thread of their own.
"""

from __future__ import annotations

import os
import sys
from functools import cache

_IMPORT_TIMEOUT_S = 30.0
"""How long a caller waits for an import in another thread, which may wait for an import lock of the
caller."""
_is_import_blocked = False
"""An import did not finish in time: a signal handler interrupted the holder of its lock. No caller waits
again."""


@cache
def is_compiled() -> bool:
    """Return whether modules that are imported from here on are compiled ones."""
    return any(name.startswith("_state__mypyc") for name in os.listdir(os.path.dirname(__file__)))


def import_in_thread(name: str) -> None:
    """Import a module of ringlog in a thread, so that an exception in the caller cannot interrupt the import.

    The caller imports it again afterwards, and receives the errors of the import.
    """
    global _is_import_blocked  # noqa: PLW0603
    if name in sys.modules or _is_import_blocked or not is_compiled():
        return
    import importlib
    import threading

    done = threading.Lock()  # An Event breaks if a signal interrupts its wait.
    done.acquire()

    def load() -> None:
        try:
            importlib.import_module(name)
        except ImportError:
            return
        finally:
            done.release()

    try:
        # Not a daemon: the interpreter must not exit in the middle of the import.
        threading.Thread(target=load, name="ringlog-import", daemon=False).start()
    except RuntimeError:
        return  # The process cannot start another thread.
    _is_import_blocked = not done.acquire(timeout=_IMPORT_TIMEOUT_S)
