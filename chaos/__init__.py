"""Fault injection: fault classes, the plans that run them, and the checkers that judge the results.

The harness sweeps, instruments and replaces parts of the Python source, so it imports the source. Engines and
client processes run the compiled build that RINGLOG_TEST_PACKAGE names, as in production.
"""
