"""The supervisor: the process tree, restarts, and the lifetime of shared memory."""

import os

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Limits NumPy's linear algebra, which is not used, to one thread. Its thread pools start with the import.
They would cost memory, and the supervisor could not be forked."""

os.environ.update(ONE_THREAD)
