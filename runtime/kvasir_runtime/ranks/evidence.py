"""What is known of a group's failure, and which of it is the cause."""

import signal

from kvasir_runtime.ranks.messages import RankFailed


class FailureEvidence:
    """False while there is none."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._words: dict[int, RankFailed] = {}
        self._ends: dict[int, int] = {}
        self._lost: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._problems or self._words or self._ends or self._lost)

    def has_ended(self, rank: int) -> bool:
        return rank in self._ends

    def add_problem(self, problem: str) -> None:
        self._problems.append(problem)

    def add_word(self, word: RankFailed) -> None:
        self._words.setdefault(word.rank, word)

    def add_end(self, rank: int, exit_code: int) -> None:
        self._ends.setdefault(rank, exit_code)

    def add_loss(self, rank: int) -> None:
        """Its connection has ended, on another node."""
        self._lost.add(rank)

    def verdict(self) -> str:
        """A rank's own error explains most, then one that ended without a word, then what others made of it."""
        own = [f"rank {word.rank}: {word.error}" for word in self._words.values() if not word.is_consequence]
        silent = [how_it_ended(f"rank {rank}", code) for rank, code in self._ends.items() if rank not in self._words]
        lost = [
            f"rank {rank} on another node has ended without a word, or cannot be reached; its node's log says why"
            for rank in sorted(self._lost - self._words.keys())
        ]
        heard = [f"rank {word.rank}: {word.error}" for word in self._words.values()]
        return (own + silent + lost + self._problems + heard)[0]


CORE_GONE_STATUS = 3
"""Of a rank that ends with its core: an error only where nobody has told its node to stop."""


def how_it_ended(rank: str, exit_code: int) -> str:
    """`rank`: its name."""
    if exit_code == CORE_GONE_STATUS:
        return f"{rank} ended, as the engine core has gone, or node 0 cannot be reached any more"
    if exit_code >= 0:
        return f"{rank} ended without a word, with status {exit_code}; its log says why"
    name = signal.Signals(-exit_code).name
    hint = "; if nobody did, the kernel's log says whether it ran out of memory" if name == "SIGKILL" else ""
    return f"{rank} was ended by {name}{hint}"
