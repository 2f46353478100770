"""Ties a child process to its parent's life, so that none is left behind however the parent ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def follow_parent(parent_pid: int) -> None:
    """Called in the child: the kernel kills it when the parent dies; ends at once if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)
