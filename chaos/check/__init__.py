"""Checkers of what clients saw: histories of whole runs (history.py), and short ones searched for an order
that explains them (lin.py). They know nothing of ringlog but its promises."""
