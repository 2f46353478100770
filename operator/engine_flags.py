#!/usr/bin/env python3
"""Writes kvasir_operator/api/engine_flags.py, the flags that the engine has; tests/contract compares the two."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

FILE = Path(__file__).parent / "kvasir_operator" / "api" / "engine_flags.py"
MODULE = '''\
"""The flags of `kvasir-runtime serve`, by which `engine.args` are checked; made by operator/engine_flags.py."""

from typing import Final

_FLAGS = """
{flags}
"""
ENGINE_FLAGS: Final = frozenset(_FLAGS.split())
'''


def module_text() -> str:
    command = [sys.executable, "-m", "kvasir_runtime", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "200"}
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout
    listed = "\n".join(line for line in text.splitlines() if line.startswith("  -"))
    flags = sorted(set(re.findall(r"--[a-z][a-z0-9-]*", listed)))
    return MODULE.format(flags=textwrap.fill(" ".join(flags), 120, break_on_hyphens=False))


if __name__ == "__main__":
    FILE.write_text(module_text())
