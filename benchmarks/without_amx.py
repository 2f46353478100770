"""Runs a command on a processor with AMX as on one without, so that both paths can be measured on one machine.

    python benchmarks/without_amx.py python benchmarks/engine_cpu.py --engines kvasir vllm-cpu

A process must ask Linux for the tile registers (arch_prctl, ARCH_REQ_XCOMP_PERM) before it may use them. A seccomp
filter, which child processes inherit, answers that one request with EPERM; PyTorch, oneDNN and our kernels then take
their AVX-512 paths. vLLM's attention asks the processor only and would die of its first tile instruction: a
sitecustomize module on PYTHONPATH tells it. x86-64 Linux only.
"""

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM = 158, 0x1023
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
SYSCALL_NUMBER, FIRST_ARGUMENT = 0, 16  # offsets into struct seccomp_data
SITE = Path(__file__).parent / "no_amx_site"
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("without_amx.py: no command given; write for example: python benchmarks/without_amx.py python x.py")
    refuse_tiles()
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), inherited)))
    os.execvp(sys.argv[1], sys.argv[1:])


def refuse_tiles() -> None:
    """For this process and all that it starts. Raises OSError."""
    program = b"".join(
        (
            instruction(LOAD_WORD, SYSCALL_NUMBER),
            instruction(JUMP_IF_EQUAL, ARCH_PRCTL, if_false=3),
            instruction(LOAD_WORD, FIRST_ARGUMENT),
            instruction(JUMP_IF_EQUAL, ARCH_REQ_XCOMP_PERM, if_false=1),
            instruction(RETURN, REFUSE),
            instruction(RETURN, ALLOW),
        )
    )
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(FilterProgram(len(program) // 8, program)))


def instruction(code: int, operand: int, if_false: int = 0) -> bytes:
    """One of classic BPF; `if_false`: instructions to leave out where a comparison does not hold."""
    return struct.pack("HBBI", code, 0, if_false, operand)


def prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*arguments, *(0,) * (5 - len(arguments))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


if __name__ == "__main__":
    main()
