"""Picks the form of a linear layer's weight by timing each one briefly on a weight of that shape.

bfloat16 weights on the CPU are kept once, in the layout of the chosen path, and the original is let go. On GPUs a few
rows in half precision have a kernel of their own. All else goes through torch as it is: float32 results stay exact.

Which is fastest cannot be known from the instruction set: bf16 dot products are four times faster than float32 on one
maker's cores and slower than it on another's. What is timed is one thread's share in that thread's processor time, so
that neighbours on a busy machine, or a CPU quota, do not decide.

One form serves every number of rows, and only our kernels' variants stand for choice, since they alone promise that a
row's product does not depend on the others (docs/decisions/0042-a-rows-numbers-are-its-own.md).
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
from kvasir_runtime.kernels.linear import VARIANTS, Linear, PackedWeight, PlainWeight, plain_weight
from kvasir_runtime.kernels.native import load_library

logger = logging.getLogger(__name__)

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

    `path` is auto (the fastest instructions on our layout, where they are compiled), torch, or one of VARIANTS (these
    instructions). `batch_invariant` asks for one order of summation for any number of rows on GPUs, too. Raises
    ConfigurationError for a path that cannot run here.
    """
    if weight.device.type == "cuda":
        return _weight_on_gpu(weight, bias, path, batch_invariant=batch_invariant)
    library = load_library()
    variant = choose_variant(library, path, weight)
    if library is None or variant is None:
        return plain_weight(weight, bias)
    return PackedWeight(library, weight, bias, variant)


def choose_variant(library: CDLL | None, path: str, weight: torch.Tensor) -> str | None:
    """Which of VARIANTS is to multiply such a weight in the CPU's memory; None: torch. `path` as of `make_weight`.
    Raises ConfigurationError where it cannot run here."""
    if weight.dtype != torch.bfloat16 or path == "torch" or (path == "auto" and library is None):
        return None
    if library is None:
        raise ConfigurationError(f"linear path {path!r} needs compiled kernels but no compiler was found; install g++")
    if path == "auto":
        return measured_choice(library, *weight.shape, torch.get_num_threads())
    if not library.kvasir_linear_has(VARIANTS[path]):
        raise ConfigurationError(f"linear path {path!r} needs instructions that this CPU or compiler lacks; use 'auto'")
    return path


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
def measured_choice(library: CDLL, outputs: int, inputs: int, num_threads: int) -> str:
    """The fastest of VARIANTS for weights [outputs, inputs], whose product so many threads share."""
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
        multiply(x)  # its first call takes memory
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


def _candidates(library: CDLL, weight: torch.Tensor) -> dict[str, Multiply]:
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
