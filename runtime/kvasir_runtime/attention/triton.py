"""The attention backend of GPUs: our Triton kernels. Under TRITON_INTERPRET=1 they also run, slowly, on CPU tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import DecodeBounds, HeadNorms, LayerCache, StepInputs
from kvasir_runtime.kernels.attention_tiles import (
    SPLIT_UNIT_KEYS,
    HeadShape,
    prefill_tile,
    prefill_tiles,
    splits_for,
    workspace_floats,
)
from kvasir_runtime.kernels.paged_attention_triton import (
    Attend,
    DecodeShape,
    LayerScaling,
    PagedInputs,
    SplitWorkspace,
    prepare_decode,
    prepare_prefill,
)
from kvasir_runtime.kernels.rotate_and_write_triton import triton_rotate_and_write


class TritonAttention:
    """One object serves all layers and steps. It owns the workspace of split decodes, so steps run one at a time."""

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        bounds: DecodeBounds,
        *,
        num_sms: int | None = None,
        shared_bytes: int | None = None,
        split_unit_keys: int = SPLIT_UNIT_KEYS,
    ) -> None:
        """`num_sms`: multiprocessors to fill, and what a program may have of one's shared memory, by default the
        device's."""
        self._device = device
        self._bounds = bounds
        self._num_sms = num_sms or _num_sms(device)
        self._shared_bytes = shared_bytes or _shared_bytes(device)
        self._split_unit_keys = split_unit_keys
        self._workspaces: dict[HeadShape, SplitWorkspace] = {}

    def prepare(self, inputs: StepInputs) -> "TritonAttentionStep":
        """Raises ValueError for decodes beyond the bounds."""
        lengths, bounds = inputs.lengths, self._bounds
        query_len = int(lengths.query_lens[: lengths.num_decodes].max(initial=0))
        if lengths.num_decodes > bounds.max_num_decodes or query_len > bounds.max_query_len:
            raise ValueError(
                f"{lengths.num_decodes} decodes of up to {query_len} tokens: the attention workspace holds "
                f"{bounds.max_num_decodes} of {bounds.max_query_len}"
            )
        return TritonAttentionStep(
            inputs, query_len, bounds.max_query_len, self._num_sms, self._shared_bytes, self._split_unit_keys,
            self.workspace,
        )  # fmt: skip

    def workspace(self, heads: HeadShape) -> SplitWorkspace:
        """Taken whole at the first decode, which the memory profile makes: CUDA graphs hold its address."""
        if heads not in self._workspaces:
            sizes = workspace_floats(heads, self._bounds.max_num_tokens, self._num_sms)
            self._workspaces[heads] = SplitWorkspace(
                *(torch.empty(size, dtype=torch.float32, device=self._device) for size in sizes)
            )
        return self._workspaces[heads]


@dataclass(frozen=True, slots=True)
class TritonAttentionStep:
    inputs: StepInputs
    query_len: int
    """Of the longest decode in this step."""
    max_query_len: int
    """Of any step's."""
    num_sms: int
    shared_bytes: int
    """Of a program, at most."""
    split_unit_keys: int
    workspace: Callable[[HeadShape], SplitWorkspace]
    _tiles: dict[int, Tensor] = field(default_factory=dict)
    """Query tokens of a tile -> the prefill tiles, for all layers of the same heads."""
    _prepared: dict[tuple[object, ...], list[Attend]] = field(default_factory=dict)
    """By what layers may differ in: launches that lack a layer's tensors alone. Making them takes Python longer than
    launching them, and an eager step waits for Python."""

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, cos: Tensor, sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:  # fmt: skip
        slots = self.inputs.groups[cache.group].slots
        weights = (None, None, 0.0) if norms is None else (norms.query_weight, norms.key_weight, norms.eps)
        return triton_rotate_and_write(
            query, key, value, cache.key, cache.value, cos, sin, self.inputs.positions, slots, *weights
        )

    def attend(
        self, query: Tensor, cache: LayerCache, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        kind = (
            *(query.shape, query.stride(), cache.key.shape, cache.key.stride(), cache.key.dtype, cache.group),
            *(scale, window, softcap),
        )
        launches = self._prepared.get(kind)
        if launches is None:
            launches = self._prepared[kind] = list(self._prepare(query, cache, LayerScaling(scale, window, softcap)))
        out = query.new_empty(query.shape)
        for attend in launches:
            attend(out, query, cache.key, cache.value)
        return out

    def _prepare(self, query: Tensor, cache: LayerCache, scaling: LayerScaling) -> Iterator[Attend]:
        inputs, lengths = self.inputs, self.inputs.lengths
        paged = PagedInputs(inputs.query_starts, inputs.seq_lens, inputs.rows, inputs.groups[cache.group].block_table)
        heads = HeadShape(query.shape[1], cache.key.shape[2], query.shape[2])
        if lengths.num_decodes:
            yield prepare_decode(query, cache.key, paged, scaling, self._decode_shape(heads), self.workspace(heads))
        if lengths.num_decodes < len(lengths.query_lens):
            tile = prefill_tile(heads, cache.key.element_size(), self.shared_bytes)
            tiles = self._prefill_tiles(tile.num_rows // heads.group)
            yield prepare_prefill(query, cache.key, paged, scaling, tiles, tile)

    def _decode_shape(self, heads: HeadShape) -> DecodeShape:
        lengths = self.inputs.lengths
        return DecodeShape(
            num_decodes=lengths.num_decodes,
            query_len=self.query_len,
            max_query_len=self.max_query_len,
            max_seq_len=lengths.max_seq_len,
            num_sms=self.num_sms,
            splits=splits_for(heads.num_kv_heads, self.num_sms, self.split_unit_keys),
        )

    def _prefill_tiles(self, num_queries: int) -> Tensor:
        if num_queries not in self._tiles:
            lengths, device = self.inputs.lengths, self.inputs.seq_lens.device
            tiles = torch.from_numpy(prefill_tiles(lengths.query_lens, lengths.num_decodes, num_queries))
            on_gpu = device.type == "cuda"
            self._tiles[num_queries] = tiles.pin_memory().to(device, non_blocking=True) if on_gpu else tiles
        return self._tiles[num_queries]


def _num_sms(device: torch.device) -> int:
    """Multiprocessors; the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return found
