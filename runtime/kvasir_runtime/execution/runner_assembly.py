"""Puts a rank's parts together into a runner: KV buffer, rows, decoder, proposer, graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, LayerCache, StepInputs
from kvasir_runtime.execution.captures import AgreedCapture
from kvasir_runtime.execution.executor import StepRunner
from kvasir_runtime.execution.forbidden_tokens import AllowedTokens, BadWords
from kvasir_runtime.execution.grammar_mask import GrammarMask
from kvasir_runtime.execution.graphs import RunnerGraphs
from kvasir_runtime.execution.kv_buffer import SequenceLimits, allocate_kv_buffer, layer_caches
from kvasir_runtime.execution.kv_memory import KvMemory, Preparation
from kvasir_runtime.execution.layer_runner import LayerRunner
from kvasir_runtime.execution.model_runner import EagerDecoder, ModelRunner
from kvasir_runtime.execution.pipeline import Pipeline
from kvasir_runtime.execution.pipeline_stages import EarlierStage, LastStage, StageFailures
from kvasir_runtime.execution.platform import GraphSetup, Platform
from kvasir_runtime.execution.pooling import Pooler
from kvasir_runtime.execution.rows import PopulatedPages, Rows
from kvasir_runtime.execution.stage_buffer import ENTERING, LineFormat, StageBuffer, StageDecoder
from kvasir_runtime.execution.step_features import BeamCandidates, Logprobs, PromptScores, StepFeature, extra_buffers
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec, make_layout
from kvasir_runtime.models.decoder import ComputeStep, Decoder, DecoderOutput
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.proposer import Proposer, ProposerSetup
from kvasir_runtime.structured.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """What a runner keeps from one step to the next."""

    rows: Rows
    buffer: Tensor  # uint8 [num_blocks, page_bytes]
    caches: list[LayerCache]
    """Views of the buffer, a spec each: of the rank's layers, then the proposer's."""
    transfers: Transfers
    features: tuple[StepFeature, ...]
    extras: Mapping[str, Tensor]
    """What of each token layers read besides (`StepInputs.extras`)."""
    entering: StageBuffer | None
    """None unless a pipeline stage comes before."""


@dataclass(frozen=True, slots=True)
class ByCaptures:
    """Runs a step on whatever was made for its kind."""

    capturing: ComputeStep
    plain: ComputeStep

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        return (self.capturing if captures else self.plain)(inputs, kept_tokens, captures=captures)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerAssembly:
    """The parts that runners over KV buffers of different sizes share."""

    decoder: Decoder
    proposer: Proposer | None
    placement: Placement
    platform: Platform
    backend: AttentionBackend
    step_ops: StepOps
    kv_specs: list[KvSpec]
    """Of this rank's layers of the target, then the proposer's."""
    block_size: int
    limits: SequenceLimits
    max_drafts: int
    least: Callable[[int], int]
    """Of the numbers of the ranks that share these layers."""
    vocabulary: Callable[[], Vocabulary]
    """Raises GrammarError where there is none."""
    pooler: Callable[[Rows, Transfers], Pooler] | None = None
    """None: tokens are drawn."""
    pipeline: Pipeline | None = None
    """None: this rank has all layers, or its part of each."""

    @property
    def layout(self) -> KvLayout:
        """Of the target's layers, then the proposer's."""
        if self.pipeline is not None:
            return self.pipeline.layout(self.block_size)
        return make_layout(self.kv_specs, self.block_size)

    def runner(self, num_blocks: int, graph_bytes: int = 0) -> StepRunner:
        """On a pipeline stage all steps of a runner, those of measuring and warming up too, must be taken by the
        runners of all stages."""
        memory = self._memory(num_blocks)
        if self.pipeline is None:
            return self._model_runner(memory, graph_bytes)
        if not self.pipeline.stage.is_last:
            return self._earlier_stage(self.pipeline, memory, graph_bytes)
        assert memory.entering is not None, "a pipeline has two stages at least"
        return LastStage(
            self._model_runner(memory, graph_bytes),
            self.pipeline.link,
            self._failures(self.pipeline),
            entering=memory.entering,
            rows=memory.rows,
            transfers=memory.transfers,
        )

    def _memory(self, num_blocks: int) -> RunnerMemory:
        layout, transfers = self.layout, self.platform.transfers()
        buffer = allocate_kv_buffer(layout, num_blocks, self.placement.device)
        draws = self.decoder.head is not None
        rows = Rows(
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            block_size=self.block_size,
            num_groups=len(layout.groups),
            max_drafts=self.max_drafts,
            vocab_size=self.decoder.options.vocab_size if draws else 1,  # else nothing is counted by token
            transfers=transfers,
        )
        most_tokens = max(self.limits.max_num_batched_tokens, self.limits.max_num_seqs * (1 + self.max_drafts))
        features = self._features(rows, transfers)
        extras, entering = extra_buffers(features, most_tokens, self.placement.device), None
        if self.pipeline is not None and not self.pipeline.stage.is_first:
            entering = StageBuffer(self._lines_before(self.pipeline, self.decoder.first_layer), most_tokens)
            extras[ENTERING] = entering.states
        caches = layer_caches(layout, self.kv_specs, buffer)
        return RunnerMemory(rows, buffer, caches, transfers, features, extras, entering)

    def _features(self, rows: Rows, transfers: Transfers) -> tuple[StepFeature, ...]:
        if self.pooler is not None:
            return (self.pooler(rows, transfers),)
        features = step_features(rows, self.decoder.logits)
        if self.decoder.head is not None:
            features += (AllowedTokens(rows), BadWords(rows, transfers))
            features += (GrammarMask(rows, transfers, self.vocabulary),)
        return features

    def _model_runner(self, memory: RunnerMemory, graph_bytes: int) -> ModelRunner:
        num_own, proposer = len(self.decoder.kv_specs(self.placement.dtype)), self.proposer
        captured = () if proposer is None else proposer.captured_layers
        kind = EagerDecoder if self.pipeline is None else StageDecoder
        eager = kind(self.decoder, self.backend, memory.caches[:num_own], captured)
        graphs = self._graphs(memory, graph_bytes)
        compute = self._on_graphs(graphs, eager, captured)
        if proposer is not None:
            setup = ProposerSetup(
                caches=memory.caches[num_own:],
                max_num_seqs=self.limits.max_num_seqs,
                max_drafts=self.max_drafts,
                never_waits=self.platform.never_waits,
                on_graphs=graphs.of,
                agree=partial(self.placement.tensor.broadcast, source=0),
            )
            proposer.bind(setup)
        return ModelRunner(
            rows=memory.rows,
            buffer=memory.buffer,
            compute=compute,
            to_logits=self.decoder.logits,
            ops=self.step_ops,
            proposer=proposer,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            transfers=memory.transfers,
            features=memory.features,
            extras=memory.extras,
            tensor=self.placement.tensor,
            kv_memory=_kv_memory(memory, graphs),
            take_warming_up=graphs.take_warming_up,
        )

    def _earlier_stage(self, pipeline: Pipeline, memory: RunnerMemory, graph_bytes: int) -> EarlierStage:
        eager = StageDecoder(self.decoder, self.backend, memory.caches, pipeline.captured_layers)
        graphs = self._graphs(memory, graph_bytes)
        layers = LayerRunner(
            rows=memory.rows,
            buffer=memory.buffer,
            compute=self._on_graphs(graphs, eager, pipeline.captured_layers),
            ops=self.step_ops,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            transfers=memory.transfers,
            features=memory.features,
            extras=memory.extras,
        )
        return EarlierStage(
            layers,
            pipeline.link,
            self._failures(pipeline),
            entering=memory.entering,
            leaving=self._lines_before(pipeline, self.decoder.first_layer + len(self.decoder.layers)),
            kv_memory=_kv_memory(memory, graphs),
        )

    @property
    def _query_lens(self) -> list[int]:
        """Of the target's graphs: decodes with all drafts first, then those without."""
        return [1 + self.max_drafts, 1] if self.max_drafts else [1]

    def _on_graphs(self, graphs: RunnerGraphs, eager: ComputeStep, captured_layers: tuple[int, ...]) -> ComputeStep:
        """On CPUs steps that capture have recordings of their own. On CUDA, where graphs are made ahead, one serves
        all: a copy beside other kernels is cheaper than twice the graphs."""
        compute = graphs.of(eager, self._query_lens)
        if not captured_layers or self.placement.device.type == "cuda":
            return compute
        return ByCaptures(compute, graphs.of(partial(eager, captures=False), self._query_lens))

    def _graphs(self, memory: RunnerMemory, graph_bytes: int) -> RunnerGraphs:
        tensor = self.placement.tensor
        return self.platform.graphs(
            GraphSetup(
                block_tables=memory.rows.block_tables,
                extras=memory.extras,
                max_seq_len=self.limits.max_model_len,
                max_num_seqs=self.limits.max_num_seqs,
                num_bytes=graph_bytes,
                counts=tensor.counts,
                agreed=lambda capture: capture if tensor.size == 1 else AgreedCapture(capture, self.least),
                kernels=frozenset({self.backend.name, self.placement.ops.name}),
            )
        )

    def _failures(self, pipeline: Pipeline) -> StageFailures:
        return StageFailures(1 + pipeline.stage.index, is_alone=self.placement.tensor.size == 1)

    def _lines_before(self, pipeline: Pipeline, layer: int) -> LineFormat:
        """What travels to the stage that begins with this layer."""
        placement, num_planes = self.placement, pipeline.num_planes(layer)
        return LineFormat(num_planes, self.decoder.options.hidden_size, placement.dtype, placement.device)


def step_features(rows: Rows, to_logits: Callable[[Tensor], Tensor]) -> tuple[StepFeature, ...]:
    """In the order in which they see logits: whoever wants raw ones comes before who changes them."""
    return Logprobs(rows), PromptScores(rows, to_logits), BeamCandidates(rows)


def _kv_memory(memory: RunnerMemory, graphs: RunnerGraphs) -> KvMemory:
    """Recordings of a CPU stay true, since addresses do."""
    pages = PopulatedPages(memory.buffer, memory.rows)
    capturing = Preparation(graphs.capture_next, graphs.forget if memory.buffer.is_cuda else lambda: None)
    return KvMemory(memory.buffer, [Preparation(pages.populate_next, pages.forget), capturing])
