"""The engine's processes. Where there are compiled cores, a process that was started as one runs these."""

from __future__ import annotations

from ringlog import cores

# Before anything of ours is imported: what is imported once stays what it is.
if cores.is_actor():
    cores.use()
