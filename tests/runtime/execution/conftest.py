"""Rows, plans and a tiny checkpoint, for everything between the scheduler's plan and the decoder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.transfers import Download, Transfers
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Fork, NewSequence, StepPlan

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class CountingTransfers(Transfers):
    """Counts what a step sends to the device and back."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.uploads: list[int] = []  # bytes each
        self.downloads: list[int] = []

    def upload(self, *arrays: NDArray[np.generic]) -> tuple[Tensor, ...]:
        self.uploads.append(sum(array.nbytes for array in arrays))
        return super().upload(*arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        self.downloads.append(sum(tensor.nbytes for tensor in tensors))
        return super().download(tensors)


@pytest.fixture
def transfers() -> CountingTransfers:
    return CountingTransfers()


@pytest.fixture
def make_rows(transfers: CountingTransfers) -> Callable[..., Rows]:
    def make(**changes: Any) -> Rows:
        sizes = {"max_num_seqs": 4, "max_model_len": 16, "block_size": 4, "num_groups": 1, "max_drafts": 2}
        return Rows(**(sizes | {"vocab_size": 100} | changes), transfers=transfers)

    return make


@pytest.fixture
def new_sequence() -> Callable[..., NewSequence]:
    """`new_sequence(row, token_ids, prompt=None, computed=0, candidates=0, salt=None, **sampling)`, else greedy."""

    def make(
        row: int,
        token_ids: Sequence[int],
        prompt: int | None = None,
        computed: int = 0,
        candidates: int = 0,
        salt: str | None = None,
        **params: Any,
    ) -> NewSequence:
        sampling = SamplingParams(**({"max_tokens": 9, "seed": row, "temperature": 0.0} | params))
        num_prompt = len(token_ids) if prompt is None else prompt
        spec = RequestSpec(prompt_token_ids=list(token_ids[:num_prompt]), sampling=sampling, cache_salt=salt)
        return NewSequence(row, spec, list(token_ids[num_prompt:]), computed, candidates)

    return make


@pytest.fixture
def make_plan() -> Callable[..., StepPlan]:
    """A plan of `decodes` (row, tokens) with their `starts`, and `chunks` (row, first position, tokens, samples)."""

    def make(
        *,
        decodes: Sequence[tuple[int, int]] = (),
        chunks: Sequence[tuple[int, int, int, bool]] = (),
        starts: Sequence[int] | None = None,
        added: Sequence[NewSequence] = (),
        forks: Sequence[Fork] = (),
        tables: Sequence[tuple[int, int, int, int]] = (),
        tokens: Sequence[tuple[int, int, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
        proposals: int = 0,
    ) -> StepPlan:
        return StepPlan(
            number=0,
            added=tuple(added),
            forks=tuple(forks),
            table_writes=np.array(tables, dtype=np.int32).reshape(-1, 4),
            token_writes=np.array(tokens, dtype=np.int32).reshape(-1, 3),
            block_copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
            rows=np.array([row for row, *_ in (*decodes, *chunks)], dtype=np.int32),
            num_decodes=len(decodes),
            num_new_tokens=np.array([n for _, n in decodes] + [n for _, _, n, _ in chunks], dtype=np.int32),
            starts=np.array([*(starts or [0] * len(decodes)), *(first for _, first, _, _ in chunks)], dtype=np.int32),
            samples=np.array([True] * len(decodes) + [samples for *_, samples in chunks], dtype=np.bool_),
            num_proposals=proposals,
        )

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one layer with random weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (32, 32), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (32, 32)}
    tensors = {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {f"model.layers.0.mlp.{name}.weight": (48, 32) for name in ("gate_proj", "up_proj")}
    tensors |= {"model.layers.0.mlp.down_proj.weight": (32, 48), "model.embed_tokens.weight": (64, 32)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(32)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path
