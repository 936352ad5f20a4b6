"""The supervisor: which processes there are, who restarts when, who owns shared memory."""

import os

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""NumPy's linear algebra is not used. Its thread pools, begun with its import, would cost memory, and the
supervisor could not be forked from."""

os.environ.update(ONE_THREAD)
