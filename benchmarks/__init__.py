"""Measurements of rollmesh: what its documents quote, and what a user runs on a machine of his own.

Every library gets one thread, as the launcher gives generators, and numpy's BLAS chooses its kernels for this machine.
"""

import os

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ.update(ONE_THREAD)  # read when the libraries load
os.environ.pop("OPENBLAS_CORETYPE", None)
