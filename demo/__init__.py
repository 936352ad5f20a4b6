"""The demo: a year of flights goes through an engine whose shards are killed meanwhile.

`python -m demo` (or `make demo`) writes 336,776 flights as one JSON event each, follows them live, kills
shards with SIGKILL, restarts the engine and reads everything back. It compares the result with the source by
event id and content, not with the engine's own counters. Spark reads the log, archives it and follows more
flights live; its answers must equal those of pandas. Then one carrier's records are deleted by tag and
capped. Everything is sealed, relocated to a cold directory, and read again.
"""
