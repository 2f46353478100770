"""What Python and the C library hold of the process's memory."""

import ctypes
import gc

# Objects made and not freed; 700 by default, of which a request alone makes a hundred.
_COLLECTION_THRESHOLD = 20_000


def collect_garbage_seldom() -> None:
    """What is there now stays, and is not looked at again; requests leave next to no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTION_THRESHOLD, 20, 20)


def return_free_memory() -> None:
    """Of large bodies that were held: glibc keeps theirs. 5 ms for 40 MB, 0.3 ms where there is next to none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
