"""What step features say of rows, as columns of a step's result."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.scheduling.step import CANDIDATES, LOGPROBS, POOLED, PROMPT_LOGPROBS, Candidates, Columns

Entries = Mapping[int, Sequence[TokenLogprobs]]
NONE: Mapping[int, Any] = MappingProxyType({})


def columns(
    logprobs: Entries = NONE,
    prompt_logprobs: Entries = NONE,
    candidates: Mapping[int, Candidates] = NONE,
    lines: Mapping[int, int] = NONE,
    pooled: Mapping[int, Sequence[float]] = NONE,
) -> dict[str, Columns]:
    """Of rows; `lines` are those of the rows of `logprobs` in the result."""
    made: dict[str, Columns] = {}
    if logprobs:
        made[LOGPROBS] = _scores(logprobs) | {
            "lines": np.array([lines[row] for row, own in logprobs.items() for _ in own]),
            "offsets": np.array([offset for own in logprobs.values() for offset in range(len(own))]),
        }
    if prompt_logprobs:
        made[PROMPT_LOGPROBS] = _scores(prompt_logprobs)
    if pooled:
        made[POOLED] = {"rows": np.array(list(pooled)), "vectors": np.array(list(pooled.values()), dtype=np.float32)}
    if candidates:
        lists = [(each.token_ids, each.logprobs) for each in candidates.values()]
        made[CANDIDATES] = _padded(lists) | {"rows": np.array(list(candidates)), "numbers": _lengths(lists)}
    return made


def _scores(entries: Entries) -> Columns:
    lines = [(row, entry) for row, own in entries.items() for entry in own]
    lists = [(entry.token_ids, entry.logprobs) for _, entry in lines]
    return _padded(lists) | {
        "rows": np.array([row for row, _ in lines], dtype=np.int64),
        "numbers": _lengths(lists) - 1,
        "ranks": np.array([entry.rank for _, entry in lines], dtype=np.int64),
    }


def _padded(lists: list[tuple[list[int], list[float]]]) -> Columns:
    most = max((len(ids) for ids, _ in lists), default=0)
    return {
        "token_ids": np.array([ids + [0] * (most - len(ids)) for ids, _ in lists], dtype=np.int64),
        "logprobs": np.array([values + [0.0] * (most - len(values)) for _, values in lists]),
    }


def _lengths(lists: list[tuple[list[int], list[float]]]) -> np.ndarray:
    return np.array([len(ids) for ids, _ in lists], dtype=np.int64)
