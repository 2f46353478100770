"""Where the programs of pods are on this machine."""

import shutil
from pathlib import Path

from kvasir_operator.errors import LocalRunError


def installed_program(program: str, folder: Path) -> str:
    """In `folder`, else on PATH. Raises LocalRunError where it is neither."""
    found = shutil.which(program, path=str(folder)) or shutil.which(program)
    if found is None:
        extra = program.removeprefix("kvasir-")
        raise LocalRunError(f"{program} is neither in {folder} nor on PATH: install kvasir[{extra}]")
    return found
