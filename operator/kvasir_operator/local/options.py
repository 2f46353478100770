"""What may be chosen for a local run: where the router listens, and where the programs are."""

import ipaddress
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_operator.errors import InvalidSettingsError, LocalRunError

DEFAULT_LISTEN: Final = "127.0.0.1:8080"


@dataclass(frozen=True)
class LocalOptions:
    """`listen_port` 0 takes a free port; the router of each further service listens one port on."""

    listen_address: str
    listen_port: int
    programs_folder: Path = Path(sys.executable).parent  # where kvasir-runtime and kvasir-router are looked for first

    @classmethod
    def parse(cls, listen: str) -> "LocalOptions":
        """From `ADDRESS:PORT`. Raises InvalidSettingsError for anything that is not a loopback address and a port."""
        address, _, port = listen.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise InvalidSettingsError(f"--listen is {listen!r}: expected ADDRESS:PORT, such as {DEFAULT_LISTEN}")
        if not _is_loopback(address):
            raise InvalidSettingsError(
                f"--listen is {listen!r}: local mode serves this machine only, expected an address in 127.0.0.0/8"
            )
        return cls(address, int(port))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.IPv4Address(address).is_loopback
    except ValueError:
        return False


def installed_program(program: str, folder: Path) -> str:
    """In `folder`, else on PATH. Raises LocalRunError where it is neither."""
    found = shutil.which(program, path=str(folder)) or shutil.which(program)
    if found is None:
        extra = program.removeprefix("kvasir-")
        raise LocalRunError(f"{program} is neither in {folder} nor on PATH: install kvasir[{extra}]")
    return found
