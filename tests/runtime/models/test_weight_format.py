"""Linear layers from a checkpoint: joined, sharded over ranks, and in formats that only `WeightFormat` knows."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvasir_runtime.errors import CheckpointError
from kvasir_runtime.kernels.experts import group_by_expert_reference
from kvasir_runtime.kernels.grouped_linear import GroupedWeight, SeparateExperts
from kvasir_runtime.kernels.linear import Linear, PlainWeight
from kvasir_runtime.kernels.ops import reference_ops
from kvasir_runtime.models.checkpoint import Checkpoint, Shard
from kvasir_runtime.models.checkpoint_names import LayerNames
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import read_config
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.module_loader import ModuleLoader, RopeTables
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.models.weight_format import ExpertTensors, PlainFormat

PLACEMENT = Placement(device=torch.device("cpu"), dtype=torch.float32, ops=reference_ops())
NUM_RANKS = 2
SIZES = [8, 4, 4]
NUM_INPUTS = 6
INPUTS = torch.randn(3, NUM_INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[["q", "k", "v"], ["qkv", "qkv", "qkv"]], ids=["apart", "packed"])
def names(request: pytest.FixtureRequest) -> list[str]:
    """Where the checkpoint keeps the three parts."""
    names: list[str] = request.param
    return names


@pytest.fixture
def parts(names: list[str], tmp_path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weight and bias of each part, saved under their names."""
    random = torch.Generator().manual_seed(0)
    parts = [(torch.randn(size, NUM_INPUTS, generator=random), torch.randn(size, generator=random)) for size in SIZES]
    saved = {}
    for name in set(names):
        mine = [part for part, of in zip(parts, names, strict=True) if of == name]
        saved[f"{name}.weight"] = torch.cat([weight for weight, _ in mine])
        saved[f"{name}.bias"] = torch.cat([bias for _, bias in mine])
    save_file(saved, tmp_path / "model.safetensors")
    return parts


def load(folder: Path, names: list[str], shard: Shard | None = None) -> Linear:
    with Checkpoint(folder) as checkpoint:
        weight = PlainFormat(PLACEMENT).load(checkpoint, names, SIZES, NUM_INPUTS, has_bias=True, shard=shard)
        checkpoint.check_all_taken(ignored=())
    return weight


Parts = list[tuple[torch.Tensor, torch.Tensor]]


def test_parts_lie_side_by_side_however_they_are_kept(parts: Parts, names: list[str], tmp_path: Path) -> None:
    wanted = torch.cat([INPUTS @ weight.T + bias for weight, bias in parts], -1)
    torch.testing.assert_close(load(tmp_path, names)(INPUTS), wanted)


def test_a_column_parallel_rank_gets_its_part_of_each(parts: Parts, names: list[str], tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        mine = load(tmp_path, names, Shard(0, rank, NUM_RANKS))
        wanted = [(INPUTS @ weight.T + bias).chunk(NUM_RANKS, -1)[rank] for weight, bias in parts]
        torch.testing.assert_close(mine(INPUTS), torch.cat(wanted, -1))


def test_row_parallel_ranks_add_up_to_the_whole_layer(parts: Parts, names: list[str], tmp_path: Path) -> None:
    products = [
        load(tmp_path, names, Shard(1, rank, NUM_RANKS))(INPUTS.chunk(NUM_RANKS, -1)[rank]) for rank in range(NUM_RANKS)
    ]
    wanted = torch.cat([INPUTS @ weight.T + bias for weight, bias in parts], -1)
    torch.testing.assert_close(products[0] + products[1], wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_types_that_are_not_plain_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"q.weight": torch.zeros(16, NUM_INPUTS).to(dtype)}, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=f"'q.weight' has type {dtype}, expected float32, bfloat16 or float16"),
    ):
        PlainFormat(PLACEMENT).load(checkpoint, ["q"], [16], NUM_INPUTS, has_bias=False)


class Int8Format:
    """Weights in whole numbers, with one scale a row: what a quantised checkpoint may look like."""

    def load(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        *,
        has_bias: bool,
        shard: Shard | Sequence[Shard] | None = None,
    ) -> Linear:
        rows = []
        for name, size in zip(names, out_features, strict=True):
            scale = checkpoint.take(f"{name}.scale", (size, 1))
            rows.append(checkpoint.take(f"{name}.weight", (size, in_features)) * scale)
        return PlainWeight(torch.cat(rows), None)

    def load_experts(
        self, checkpoint: Checkpoint, tensors: ExpertTensors, local: range, shard: Shard | None
    ) -> GroupedWeight:
        assert not isinstance(tensors.names, str)
        of_experts = [
            self.load(checkpoint, tensors.names(expert), tensors.out_features, tensors.in_features, has_bias=False)
            for expert in local
        ]
        return SeparateExperts(of_experts, sum(tensors.out_features))


def quantised(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `Int8Format` reads it; `weight` becomes what that holds."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().to(torch.int8)
    weight.copy_(whole * scale)
    return {f"{name}.weight": whole, f"{name}.scale": scale}


def int8_modules(checkpoint: Checkpoint, norm_eps: float) -> ModuleLoader:
    return ModuleLoader(
        checkpoint=checkpoint,
        placement=PLACEMENT,
        weight_format=Int8Format(),
        ropes=RopeTables(16, PLACEMENT.device),
        norm_eps=norm_eps,
        norm_weight_offset=0.0,
    )


def test_a_quantised_layer_is_a_format_and_nothing_else(
    tensors: dict[str, torch.Tensor], write_checkpoint: Callable[..., Path]
) -> None:
    saved = dict(tensors)
    for name, tensor in tensors.items():
        if "proj" in name:
            saved |= quantised(name.removesuffix(".weight"), tensor)
    folder = write_checkpoint(saved)
    options = read_options(read_config(folder))
    with Checkpoint(folder) as checkpoint:
        layers = LayerLoader(int8_modules(checkpoint, options.norm_eps), LayerNames(), options.hidden_size)
        mlp = layers.mlp("model.layers.0", options.layers[0].mlp)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    gate, up, down = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    torch.testing.assert_close(mlp(hidden), (torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T)


def test_quantised_experts_are_the_same_format(write_checkpoint: Callable[..., Path]) -> None:
    weights = torch.randn(3, 8, NUM_INPUTS, generator=torch.Generator().manual_seed(0))
    saved = [quantised(f"experts.{expert}.up", weight) for expert, weight in enumerate(weights)]
    folder = write_checkpoint(saved[0] | saved[1] | saved[2])
    described = ExpertTensors(
        num_experts=3, names=lambda expert: [f"experts.{expert}.up"], out_features=[8], in_features=NUM_INPUTS
    )
    with Checkpoint(folder) as checkpoint:
        experts = int8_modules(checkpoint, norm_eps=1e-6).experts(described, range(1, 3), None)
    groups = group_by_expert_reference(torch.tensor([[2], [1], [2]], dtype=torch.int32), range(1, 3))
    wanted = torch.stack([INPUTS[token] @ weights[expert].T for token, expert in ((1, 1), (0, 2), (2, 2))])
    torch.testing.assert_close(experts.multiply_tokens(INPUTS, groups), wanted)
