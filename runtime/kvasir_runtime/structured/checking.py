"""Tries grammars in a child process with bounds on its processor time and memory.

One that would take for ever ends with the child, so neither the server nor an engine hears of it. How long a grammar
takes to be made hardly depends on the vocabulary, so the child has single bytes for one.
"""

import json
import resource
import selectors
import signal
import subprocess
import sys
from typing import IO, Final

from kvasir_runtime.errors import GrammarError, ServerUnavailableError
from kvasir_runtime.structured.vocabulary import Vocabulary

MAX_PROCESSOR_SECONDS: Final = 1.0
"""That a grammar may take to be made; each rank makes it again, beside its steps."""
MAX_SECONDS: Final = 30.0
"""On a clock, where the machine has other work."""
MAX_MEMORY_BYTES: Final = 1 << 30


class TooCostlyError(GrammarError):
    """It takes too long, or too much memory, to be made."""


class GrammarChecker:
    """For one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._child: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> None:
        """Raises GrammarError where it is none, TooCostlyError where it would take too long or too much memory, and
        ServerUnavailableError where that is not known: the child was killed by others, or got no processor.
        """
        child = self._child = self._child or self._started()
        answer = _asked(child, json.dumps(grammar))
        if answer is None:
            status = self._ended()
            if status == -signal.SIGKILL:
                raise ServerUnavailableError("the grammar could not be tried, the machine is too busy; ask again")
            raise TooCostlyError(
                f"it takes more than {MAX_PROCESSOR_SECONDS:g} s or {MAX_MEMORY_BYTES >> 20} MiB to be made; "
                "ask for a simpler one"
            )
        fault = json.loads(answer)
        if fault is not None:
            raise GrammarError(fault)

    def close(self) -> None:
        self._ended()

    def _ended(self) -> int | None:
        """The child's status; SIGKILL's where it was still there."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.kill()
        child.communicate()
        return child.returncode

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", __spec__.name, str(self._vocab_size)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")


def _asked(child: "subprocess.Popen[str]", line: str) -> str | None:
    """None: the child has ended, or does not answer."""
    if child.stdin is None or child.stdout is None:
        return None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except OSError:
        return None
    with selectors.DefaultSelector() as selector:  # unlike select(2), for file descriptors beyond 1,023 too
        selector.register(child.stdout, selectors.EVENT_READ)
        return (child.stdout.readline() or None) if selector.select(MAX_SECONDS) else None


class _Bytes:
    """A tokenizer of single bytes; all other ids are special, so that a grammar may name them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.special_ids = frozenset(range(256, vocab_size))

    def token(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def _answer_lines(vocabulary: Vocabulary, asked: IO[str], answers: IO[str]) -> None:
    for line in asked:
        signal.setitimer(signal.ITIMER_PROF, MAX_PROCESSOR_SECONDS)  # whose signal ends the process
        fault = vocabulary.fault_of(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(fault) + "\n")
        answers.flush()


def main() -> None:
    """Until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent's to handle
    vocabulary = Vocabulary(_Bytes(int(sys.argv[1])), int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    _answer_lines(vocabulary, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
