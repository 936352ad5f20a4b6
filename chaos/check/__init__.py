"""Checkers of what clients observed.

`history.py` judges histories of whole runs. `lin.py` searches short histories for a linearization. They know
only the guarantees of ringlog, not its code.
"""
