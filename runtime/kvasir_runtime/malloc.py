"""How the engine core's C library keeps memory: freed tensors are used again instead of being given back.

By default glibc maps every large tensor anew, and the kernel clears its pages each time. Nothing changes with another C
library. Torch is not imported here, so that `share_one_arena` can come before it.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of malloc.h
_DEFAULT_TRIM_THRESHOLD, _DEFAULT_MMAP_MAX = 128 * 1024, 65536


def share_one_arena() -> None:
    """Before the first thread starts: those that threads get of their own cannot grow past 64 MiB."""
    _set(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """After the weights are loaded: between them, what loading freed would never be used again."""
    _set(_MMAP_MAX, 0)
    _set(_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """All that is free now; and until `keep_freed_memory` what is freed later is given back again, too."""
    _set(_MMAP_MAX, _DEFAULT_MMAP_MAX)
    _set(_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
