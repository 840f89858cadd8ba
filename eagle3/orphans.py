"""No process goes on without the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process the moment its parent ends, however that ends.

    Linux sends the signal when the thread ends that started this process: it must be one that
    lives as long as its process, as the main one does.

    Args:
        parent_pid: the process that started this one; if it has ended already, so does this one.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)
