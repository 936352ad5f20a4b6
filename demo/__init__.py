"""The demonstration: a year of flights through an engine whose shards are killed on the way.

`python -m demo` (or `make demo`) writes 336,776 flights as one JSON event each, follows them live, kills
shards with SIGKILL, restarts the engine, reads everything back and judges what it finds against the
source, by event id and content, not by the engine's own counters. Spark reads the log, archives it and
follows more flights live; its answers must be pandas' own. Then one carrier's records are deleted by tag and
capped, everything is sealed and relocated to a cold directory, and all of it is read again.
"""
