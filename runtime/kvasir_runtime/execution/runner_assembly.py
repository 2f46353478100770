"""Puts a rank's parts together into a runner: KV buffer, rows, decoder, proposer, CUDA graphs."""

from dataclasses import dataclass

from kvasir_runtime.attention.backend import AttentionBackend
from kvasir_runtime.execution.cuda_graph import CudaGraphCapture
from kvasir_runtime.execution.graphs import DecodeGraphs, graph_sizes
from kvasir_runtime.execution.kv_buffer import SequenceLimits, allocate_kv_buffer, layer_caches
from kvasir_runtime.execution.model_runner import EagerDecoder, ModelRunner
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec, make_layout
from kvasir_runtime.models.decoder import Decoder, kv_specs
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.speculative.proposer import Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerAssembly:
    """The parts that runners over KV buffers of different sizes share."""

    decoder: Decoder
    proposer: Proposer | None
    placement: Placement
    backend: AttentionBackend
    step_ops: StepOps
    block_size: int
    limits: SequenceLimits
    max_drafts: int

    @property
    def layout(self) -> KvLayout:
        """Of the target's layers, then the proposer's."""
        return make_layout([*self._target_specs(), *self._proposer_specs()], self.block_size)

    def runner(self, num_blocks: int, graph_bytes: int = 0) -> ModelRunner:
        device, layout, proposer = self.placement.device, self.layout, self.proposer
        buffer = allocate_kv_buffer(layout, num_blocks, device)
        num_layers = len(self._target_specs())
        caches = layer_caches(layout, [*self._target_specs(), *self._proposer_specs()], buffer)
        if proposer is not None:
            proposer.bind(caches[num_layers:])
        transfers = Transfers(device)
        rows = Rows(
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            block_size=self.block_size,
            num_groups=len(layout.groups),
            max_drafts=self.max_drafts,
            vocab_size=self.decoder.options.vocab_size,
            transfers=transfers,
        )
        captured = () if proposer is None else proposer.captured_layers
        eager = EagerDecoder(self.decoder, self.backend, caches[:num_layers], captured)
        graphs = self._graphs(eager, rows, graph_bytes)
        return ModelRunner(
            rows=rows,
            buffer=buffer,
            compute=eager if graphs is None else graphs,
            to_logits=self.decoder.logits,
            ops=self.step_ops,
            proposer=proposer,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            transfers=transfers,
            idle_work=None if graphs is None else graphs.capture_next,
        )

    def _graphs(self, eager: EagerDecoder, rows: Rows, graph_bytes: int) -> DecodeGraphs | None:
        """Where there is memory for them: of decodes with all drafts first, then of those without."""
        if not graph_bytes:
            return None
        capture = CudaGraphCapture(eager, rows.block_tables, self.limits.max_model_len)
        query_lens = [1 + self.max_drafts, 1] if self.max_drafts else [1]
        return DecodeGraphs(eager, capture, graph_sizes(self.limits.max_num_seqs), query_lens, graph_bytes)

    def _target_specs(self) -> list[KvSpec]:
        return list(kv_specs(self.decoder.options, self.placement.dtype))

    def _proposer_specs(self) -> list[KvSpec]:
        return [] if self.proposer is None else list(self.proposer.kv_specs)
