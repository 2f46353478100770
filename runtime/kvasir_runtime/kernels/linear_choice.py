"""Picks the form of a linear layer's weight by timing each one briefly on a weight of that shape.

bfloat16 weights on the CPU are kept once, in the layout of the chosen path, and the original is let go. On GPUs a few
rows in half precision have a kernel of their own. All else goes through torch as it is: float32 results stay exact.

Which is fastest cannot be known from the instruction set: bf16 dot products are four times faster than float32 on one
maker's cores and slower than it on another's. What is timed is one thread's share in that thread's processor time, so
that neighbours on a busy machine, or a CPU quota, do not decide.

One form serves every number of rows. Where our kernels are compiled only their variants stand for choice, since they
alone promise that a row's product does not depend on the others (docs/decisions/0042-a-rows-numbers-are-its-own.md).
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL

import torch

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.linear import (
    VARIANTS,
    Linear,
    OneDnnWeight,
    PackedWeight,
    PlainWeight,
    check_onednn,
    has_onednn,
    plain_weight,
)
from kvasir_runtime.kernels.native import load_library

logger = logging.getLogger(__name__)

PATHS = ("auto", "torch", "onednn", "packed", *VARIANTS)
MEASURED_ROWS = (1, 8, 64, 256)
"""One stream, some, many, prefill."""

MOST_MEASURED_WEIGHTS = 2 * 1024 * 1024
"""A larger weight is judged by its first rows: what is timed must outgrow the L2 cache, no more."""

ROUNDS = 3
SECONDS_PER_TIMING = 0.0015
HOPELESS = 1.5
"""A candidate this many times slower than the best is not timed again."""


Multiply = Callable[[torch.Tensor], torch.Tensor]
Measure = Callable[[dict[str, Multiply], torch.Tensor], dict[str, float]]
"""Seconds of a product by candidate."""


def make_weight(
    weight: torch.Tensor, bias: torch.Tensor | None = None, path: str = "auto", *, batch_invariant: bool = False
) -> Linear:
    """Take weight [N, K] and bias [N] over; the caller should drop its own references.

    `path` is auto (measure), torch, onednn, packed (our layout, the fastest instructions for it), or one of
    fma, dot, amx (our layout, these instructions). `batch_invariant` asks for one order of summation for any number of
    rows on GPUs, too. Raises ConfigurationError for a path that cannot run here.
    """
    if path not in PATHS:
        raise ConfigurationError(f"linear path {path!r} is not known; expected one of {', '.join(PATHS)}")
    if weight.device.type == "cuda":
        return _weight_on_gpu(weight, bias, path, batch_invariant=batch_invariant)
    if path == "torch" or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return plain_weight(weight, bias)
    library = load_library()
    if path == "onednn":
        check_onednn()
        return OneDnnWeight(weight, bias)
    if path == "auto" or (path == "packed" and library is not None):
        path = measured_choice(library, *weight.shape, torch.get_num_threads())
        if library is None:
            return OneDnnWeight(weight, bias) if path == "onednn" else PlainWeight(weight, bias)
    if library is None:
        raise ConfigurationError(f"linear path {path!r} needs compiled kernels but no compiler was found; install g++")
    if not library.kvasir_linear_has(VARIANTS[path]):
        raise ConfigurationError(f"linear path {path!r} needs instructions that this CPU or compiler lacks; use 'auto'")
    return PackedWeight(library, weight, bias, path)


def _weight_on_gpu(weight: torch.Tensor, bias: torch.Tensor | None, path: str, *, batch_invariant: bool) -> Linear:
    # imported here: importing Triton takes a second, for nothing on CPUs
    from kvasir_runtime.kernels.few_rows_triton import FewRowsWeight, suits
    from kvasir_runtime.kernels.linear_triton import TritonWeight

    if batch_invariant:
        return TritonWeight(weight, bias)
    if path != "auto" or not suits(weight):
        return PlainWeight(weight, bias)
    few_rows = FewRowsWeight(weight, bias)
    few_rows.compile()
    return few_rows


@functools.cache
def measured_choice(library: CDLL | None, outputs: int, inputs: int, num_threads: int) -> str:
    """The fastest of VARIANTS, or without our kernels of torch and onednn, for weights [outputs, inputs], whose product
    so many threads share."""
    started = time.perf_counter()
    share = min(-(-outputs // num_threads), MOST_MEASURED_WEIGHTS // inputs)
    with _one_thread():
        candidates = _candidates(library, _noise(max(16, share // 16 * 16), inputs))
        times = {rows: measure(candidates, _noise(rows, inputs)) for rows in MEASURED_ROWS}
    choice = decide(times)
    logger.debug(
        "linear %dx%d on %d threads: %s (measured in %.2f s; us by rows: %s)",
        *(outputs, inputs, num_threads, choice, time.perf_counter() - started),
        {rows: {name: round(seconds * 1e6) for name, seconds in of.items()} for rows, of in times.items()},
    )
    return choice


def measure(candidates: dict[str, Multiply], x: torch.Tensor) -> dict[str, float]:
    """Least seconds of a product by candidate, in rounds over all so that a change of clock speed hits all alike."""
    for multiply in candidates.values():
        multiply(x)  # oneDNN compiles code for a new number of rows on its first call
    least = {name: least_seconds(multiply, x) for name, multiply in candidates.items()}
    for _ in range(ROUNDS):
        for name, multiply in candidates.items():
            if least[name] < HOPELESS * min(least.values()):
                least[name] = min(least[name], least_seconds(multiply, x))
    return least


def least_seconds(multiply: Multiply, x: torch.Tensor, thread_seconds: Callable[[], float] = time.thread_time) -> float:
    least, spent = math.inf, 0.0
    while spent < SECONDS_PER_TIMING:
        started = thread_seconds()
        multiply(x)
        seconds = thread_seconds() - started
        if seconds > 0:  # a clock that stood still says nothing
            least, spent = min(least, seconds), spent + seconds
    return least


@functools.cache
def dot_is_faster(library: CDLL, measure: Measure = measure) -> bool:
    """Whether bf16 dot products beat float32 multiply-adds here, measured once in a process: for other kernels."""
    if not library.kvasir_linear_has(VARIANTS["dot"]):
        return False
    packed = PackedWeight(library, _noise(256, 256), None, "fma")
    ways: dict[str, Multiply] = {variant: packed.with_variant(variant) for variant in ("fma", "dot")}
    with _one_thread():
        times = measure(ways, _noise(MEASURED_ROWS[2], 256))
    return times["dot"] < times["fma"]


def decide(times: dict[int, dict[str, float]]) -> str:
    """From seconds by number of rows and candidate: the candidate that loses least over all of them."""
    candidates = next(iter(times.values()))
    return min(candidates, key=lambda name: sum(math.log(of[name]) for of in times.values()))


def _candidates(library: CDLL | None, weight: torch.Tensor) -> dict[str, Multiply]:
    if library is None:
        candidates: dict[str, Multiply] = {"torch": PlainWeight(weight, None)}
        if has_onednn():
            candidates["onednn"] = OneDnnWeight(weight, None)
        return candidates
    packed = PackedWeight(library, weight, None, "fma")
    return {
        variant: packed.with_variant(variant) for variant in VARIANTS if library.kvasir_linear_has(VARIANTS[variant])
    }


def _noise(rows: int, columns: int) -> torch.Tensor:
    """From a generator of its own, so that loading a model does not move torch's."""
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
