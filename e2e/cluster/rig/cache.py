"""What is made once and kept outside the tree, for every later cluster on this machine."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """The directory, filled by `make` where it is missing; it appears by one rename, so nobody finds a part of it."""
    if not directory.exists():
        with (
            only_one(directory),
            tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as made,
        ):
            if not directory.exists():
                unfinished = Path(made) / "unfinished"
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(directory)
    return directory


@contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Waits for others that make the same; the kernel releases the lock with this process, however it ends."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
