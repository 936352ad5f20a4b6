"""Every legal state of the disk after a crash, made from a recorded run, recovered and judged.

workload.py runs a short history on a recorded disk; images.py makes, for a cut after each disk call, the
disk images that some file system may leave; judge.py recovers each twice and compares it with what was
submitted and acknowledged; explore.py does that for all short histories. `python -m chaos.states` is
the exhaustive run.
"""
