"""A drill: kill processes of an engine under load, and check every guarantee by what clients observed.

`ringlog chaos` runs it, on an engine of its own or on a running one. The fault classes of `chaos/` in a
checkout use the same clients, journals and checker.
"""
