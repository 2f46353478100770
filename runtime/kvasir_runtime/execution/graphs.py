"""Graphs of decode steps by batch size: which are captured, when, and which step runs on which.

A graph holds the launches of one shape: so many requests, and so many tokens (one of each, or one and drafts), which
requests may share as they want. A step of decodes runs on the smallest captured graph that it fits into, padded by
requests and tokens that write nothing; every other step runs kernel by kernel. Graphs are captured between steps, so
the server is ready before them. How a step is captured is the caller's: on CUDA `CudaGraphCapture`, on CPUs
`RecordingCapture`, in tests anything.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.models.decoder import ComputeStep, DecoderOutput

_log = logging.getLogger(__name__)

STEPS_BEFORE_CAPTURE = 8
"""Steps of one shape that run kernel by kernel before a busy server stops for a capture."""
STEPS_BEFORE_RECORDING = 3
"""The same on a CPU, where recordings are cheap to make beside what a capture takes, and shapes are many."""

MOST_RECORDED_REQUESTS, MOST_RECORDED_TOKENS = 64, 128
"""Of a step on a CPU: in a larger one the interpreter's part is too small to see."""
MOST_UNEVEN_RECORDINGS = 256
"""Of steps whose requests have different numbers of drafts: a bound on what the lists of calls take."""


class CaptureError(Exception):
    """A step could not be captured, on CUDA mostly for want of memory."""


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    num_requests: int
    query_len: int
    """Tokens of each request: one, or one and drafts. Of requests that differ, the mean."""
    max_query_len: int | None = None
    """Of requests that differ, the longest's; None: there is no longer one."""
    num_lacking: int = 0
    """Tokens that they have fewer than the mean, rounded up, says."""

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.query_len - self.num_lacking

    def has_room_for(self, other: "GraphShape") -> bool:
        return self.num_requests >= other.num_requests and self.query_len >= other.query_len


class CapturedStep(Protocol):
    @property
    def memory_bytes(self) -> int: ...

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        """Compute at most as many requests as were captured; the output of all that were, valid until the next call."""


Capture = Callable[[GraphShape], CapturedStep]


@dataclass(slots=True)
class GraphMemory:
    """What graphs may still take, those of the target and of its drafts together."""

    bytes_left: int


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph; above eight at most a third of one is padding: 1, 2, 4, 8, 12, 16, 24, 32, 48, ..."""
    sizes = [1, 2, 4]
    while sizes[-1] < max_num_seqs:
        last = sizes[-1]
        sizes.append(last + (last if last == 4 else 1 << (last.bit_length() - 2)))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """A `ComputeStep` that runs steps on graphs where it can. Everything happens on the thread that runs steps."""

    def __init__(
        self,
        eager: ComputeStep,
        capture: Capture,
        sizes: Iterable[int],
        query_lens: Iterable[int],
        memory: GraphMemory,
        *,
        is_exact: bool = False,
        most_uneven: int = MOST_UNEVEN_RECORDINGS,
        most_uneven_tokens: int = MOST_RECORDED_TOKENS,
    ) -> None:
        """Graphs for every size and number of tokens, the first of `query_lens` first and those between them last, the
        smallest size first, while memory lasts: few streams wait most for launches. `is_exact`: no step is padded, no
        shape is captured before it has come up, and any number of tokens may be one."""
        self._eager = eager
        self._capture = capture
        self._sizes = sorted(sizes)
        wanted = [*query_lens] if is_exact else _with_means(query_lens)
        self._query_lens = sorted(wanted)
        self._all_wanted: list[GraphShape] = []
        if not is_exact:
            self._all_wanted = [self._shape(size, query_len) for query_len in wanted for size in self._sizes]
        self._wanted = [*self._all_wanted]
        self._memory = memory
        self._is_exact = is_exact
        self._steps_before = STEPS_BEFORE_RECORDING if is_exact else STEPS_BEFORE_CAPTURE
        self._num_uneven = 0
        self._most_uneven, self._most_uneven_tokens = most_uneven, most_uneven_tokens
        self._has_ended = False
        self._is_warming_up = False
        self._captured: dict[GraphShape, CapturedStep] = {}
        self._num_misses: Counter[GraphShape] = Counter()

    @property
    def captured(self) -> list[GraphShape]:
        return sorted(self._captured, key=lambda shape: (shape.num_requests, shape.num_tokens))

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        shape = self._shape_of(inputs.lengths)
        if shape is None or kept_tokens is not None:
            return self._eager(inputs, kept_tokens, captures=captures)
        graph = self._captured.get(shape)
        if graph is None:
            is_common = shape.max_query_len is None or not self._is_exact  # else one of many, most of which stay rare
            is_wanted, graph = self._is_wanted(shape), self._missed(shape)
            self._is_warming_up |= is_wanted and (is_common or graph is not None)
            graph = graph or self._larger(shape)
        if graph is None:
            return self._eager(inputs, kept_tokens, captures=captures)
        output, num_tokens = graph.replay(inputs), inputs.lengths.num_tokens
        return output if output.hidden.shape[0] == num_tokens else _without_padding(output, num_tokens)

    def capture_next(self) -> bool:
        """Capture one more graph; to be called while there is no work. False: all that there will be are there."""
        if not self._wanted:
            return False
        self._try_capture(max(self._wanted, key=lambda shape: self._num_misses[shape]))
        return bool(self._wanted)

    def forget(self) -> None:
        """What was captured: it points to memory that is given back. All is wanted as in the beginning."""
        self._memory.bytes_left += sum(captured.memory_bytes for captured in self._captured.values())
        self._captured.clear()
        self._wanted = [*self._all_wanted]
        self._num_uneven, self._has_ended = 0, False

    def take_warming_up(self) -> bool:
        """Whether steps since the last question wanted a graph that was not there before them, and that steps like them
        will have: of those whose requests have different numbers of tokens only the one that is captured counts."""
        was_warming_up, self._is_warming_up = self._is_warming_up, False
        return was_warming_up

    def _shape_of(self, lengths: StepLengths) -> GraphShape | None:
        """The smallest that a step of decodes fits into; None for any other step."""
        num_requests, longest = len(lengths.query_lens), lengths.max_query_len
        if lengths.num_decodes < num_requests or longest > self._query_lens[-1]:
            return None
        if self._is_exact:
            return self._exact_shape(lengths)
        size = next((size for size in self._sizes if size >= num_requests), None)
        if size is None:
            return None
        # A graph of single tokens has no room for a longer request, however few requests there are.
        mean = max(-(-lengths.num_tokens // size), min(longest, 2))
        return self._shape(size, next(query_len for query_len in self._query_lens if query_len >= mean))

    def _exact_shape(self, lengths: StepLengths) -> GraphShape | None:
        num_requests, num_tokens, longest = len(lengths.query_lens), lengths.num_tokens, lengths.max_query_len
        if num_requests not in self._sizes:
            return None
        if longest in self._query_lens and (lengths.query_lens == longest).all():
            return GraphShape(num_requests, longest)
        mean = -(-num_tokens // num_requests)
        shape = GraphShape(num_requests, mean, self._query_lens[-1], num_requests * mean - num_tokens)
        has_room = self._num_uneven < self._most_uneven and num_tokens <= self._most_uneven_tokens
        return shape if has_room or shape in self._captured else None

    def _shape(self, num_requests: int, query_len: int) -> GraphShape:
        longest = self._query_lens[-1]
        return GraphShape(num_requests, query_len, longest if 1 < query_len < longest else None)

    def _missed(self, shape: GraphShape) -> CapturedStep | None:
        """A shape that comes up often is captured although there is work."""
        self._num_misses[shape] += 1
        if self._num_misses[shape] >= self._steps_before and self._is_wanted(shape):
            self._try_capture(shape)
        return self._captured.get(shape)

    def _is_wanted(self, shape: GraphShape) -> bool:
        return not self._has_ended and (self._is_exact or shape in self._wanted)

    def _larger(self, shape: GraphShape) -> CapturedStep | None:
        """The next larger graph, as long as no more than half of it is padding."""
        if self._is_exact:
            return None
        larger = [
            other for other in self._captured if other.has_room_for(shape) and other.num_tokens <= 2 * shape.num_tokens
        ]
        return self._captured[min(larger, key=lambda other: other.num_tokens)] if larger else None

    def _try_capture(self, shape: GraphShape) -> None:
        if self._memory.bytes_left <= 0:
            _log.info("no more graphs: %d captured, their memory is used up", len(self._captured))
            self._end()
            return
        if not self._is_exact:
            self._wanted.remove(shape)
        try:
            captured = self._capture(shape)
        except CaptureError as error:
            level = logging.INFO if self._is_exact else logging.WARNING  # not every model can be recorded
            _log.log(level, "no more graphs: capturing %s failed: %s", shape, error)
            self._end()
            return
        self._captured[shape] = captured
        self._num_uneven += shape.max_query_len is not None
        self._memory.bytes_left -= captured.memory_bytes

    def _end(self) -> None:
        self._has_ended = True
        self._wanted.clear()


@dataclass(slots=True)
class RunnerGraphs:
    """Graphs of a runner's target, and of the passes of its drafts, within one memory limit."""

    capture_of: Callable[[ComputeStep], Capture]
    sizes: Sequence[int]
    memory: GraphMemory
    is_exact: bool = False
    _made: list[DecodeGraphs] = field(default_factory=list)

    def of(self, eager: ComputeStep, query_lens: Sequence[int]) -> ComputeStep:
        """The same on graphs of so many tokens a request; itself where there is no memory for any."""
        if self.memory.bytes_left <= 0:
            return eager
        capture = self.capture_of(eager)
        graphs = DecodeGraphs(eager, capture, self.sizes, query_lens, self.memory, is_exact=self.is_exact)
        self._made.append(graphs)
        return graphs

    def capture_next(self) -> bool:
        """As `DecodeGraphs.capture_next`; those of what was asked for first come first."""
        return any(graphs.capture_next() for graphs in self._made)

    def forget(self) -> None:
        """As `DecodeGraphs.forget`."""
        for graphs in self._made:
            graphs.forget()

    def take_warming_up(self) -> bool:
        """As `DecodeGraphs.take_warming_up`, of all of them."""
        return sum(graphs.take_warming_up() for graphs in self._made) > 0


def _with_means(query_lens: Iterable[int]) -> list[int]:
    """Those given, then powers of two between one token and the most: where requests differ, their mean is there."""
    given = [*query_lens]
    powers = (1 << exponent for exponent in range(1, max(given).bit_length()))
    return given + [power for power in powers if power < max(given) and power not in given]


def _without_padding(output: DecoderOutput, num_tokens: int) -> DecoderOutput:
    return DecoderOutput(output.hidden[:num_tokens], tuple(layer[:num_tokens] for layer in output.captured))
