"""Ties a process's life to its parent's, from its first line on: no worker outlives its front end.

It imports nothing that takes time: ``engine.process.spawned`` uses it before the engine is imported.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

# The worker's environment has the front end's process id by this name: by the time the worker looks, its
# parent may be another process.
PARENT_VARIABLE = "TRUEDRAFT_WORKER_PARENT"


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent dies (Linux), and exits if it has died already.

    Elsewhere the worker notices by the end of its connection, once it runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent():
        sys.exit(1)


def parent() -> int:
    """Returns the front end's process id."""
    return int(os.environ.get(PARENT_VARIABLE) or os.getppid())
