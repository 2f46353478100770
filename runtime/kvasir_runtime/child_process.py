"""Ties a child process to its parent's life, so that none is left behind however the parent ends, and leaves the
terminal's Ctrl-C, which all processes get, to the parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # prctl(2)


def follow_parent(parent_pid: int) -> None:
    """Called in the child: the kernel kills it when the parent dies; ends at once if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """For the block in which a child is started: it never sees SIGINT, from its first instruction on. One that the
    parent gets meanwhile comes behind the block.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
