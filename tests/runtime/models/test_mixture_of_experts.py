"""Mixtures of experts as checkpoints keep them and as ranks share them out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.models.conftest import CONFIG
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvasir_runtime.errors import CheckpointError, ConfigurationError
from kvasir_runtime.kernels.grouped_linear_triton import TritonExperts
from kvasir_runtime.kernels.ops import Ops, cpu_ops, reference_ops
from kvasir_runtime.kernels.ops_triton import triton_ops
from kvasir_runtime.models.checkpoint import Checkpoint
from kvasir_runtime.models.checkpoint_names import names_of
from kvasir_runtime.models.families import read_options
from kvasir_runtime.models.hf_config import HuggingFaceConfig
from kvasir_runtime.models.layer_loader import LayerLoader
from kvasir_runtime.models.mixture_of_experts import MixtureOfExperts, local_experts
from kvasir_runtime.models.module_loader import make_module_loader
from kvasir_runtime.models.placement import Placement
from kvasir_runtime.parallel.collectives import SingleRank

HIDDEN, SIZE, NUM_EXPERTS, SHARED = 32, 24, 5, 40
TOKENS = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
MIXTURE = CONFIG | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": SIZE,
    "shared_expert_intermediate_size": SHARED,
}


def mixture_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (NUM_EXPERTS, HIDDEN),
        "shared_expert_gate": (1, HIDDEN),
        "shared_expert.gate_proj": (SHARED, HIDDEN),
        "shared_expert.up_proj": (SHARED, HIDDEN),
        "shared_expert.down_proj": (HIDDEN, SHARED),
    }
    for expert in range(NUM_EXPERTS):
        shapes[f"experts.{expert}.gate_proj"] = (SIZE, HIDDEN)
        shapes[f"experts.{expert}.up_proj"] = (SIZE, HIDDEN)
        shapes[f"experts.{expert}.down_proj"] = (HIDDEN, SIZE)
    random = torch.Generator().manual_seed(0)
    return {f"layer.mlp.{name}.weight": torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with all experts in one tensor."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}

    def experts(part: str) -> Tensor:
        return torch.stack([tensors[f"layer.mlp.experts.{i}.{part}.weight"] for i in range(NUM_EXPERTS)])

    gate_up = torch.cat([experts("gate_proj"), experts("up_proj")], 1)
    return kept | {"layer.mlp.experts.gate_up_proj": gate_up, "layer.mlp.experts.down_proj": experts("down_proj")}


class Rank:
    """One of several, whose sum is its own part."""

    name = "alone"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.num_sums = rank, size, 0
        self.counts = SingleRank().counts

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        raise AssertionError("a mixture gathers nothing")

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("a mixture broadcasts nothing")


def placement(
    rank: Rank | SingleRank,
    expert_parallel: bool = False,
    ops: Ops | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Placement:
    return Placement(
        device=torch.device(device),
        dtype=dtype,
        ops=ops or reference_ops(),
        tensor=rank,
        expert_parallel=expert_parallel,
        **changes,
    )


def load(folder: Path, place: Placement, **changes: Any) -> MixtureOfExperts:
    options = read_options(HuggingFaceConfig(folder / "config.json", MIXTURE | changes))
    with Checkpoint(folder) as checkpoint:
        modules = make_module_loader(checkpoint, options, place, num_positions=16)
        layers = LayerLoader(modules, names_of(options.architecture).layer, options.hidden_size)
        mixture = layers.mlp("layer", options.layers[0].mlp)
        checkpoint.check_all_taken(ignored=())
    assert isinstance(mixture, MixtureOfExperts)
    return mixture


@pytest.fixture(params=["separate", "fused"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensors = mixture_tensors()
    save_file(tensors if request.param == "separate" else fused(tensors), tmp_path / "model.safetensors")
    return tmp_path


def by_hand(hidden: Tensor) -> Tensor:
    """Token by token and expert by expert."""
    weights = {name.removeprefix("layer.mlp.").removesuffix(".weight"): t for name, t in mixture_tensors().items()}

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up, down = (weights[f"{name}.{part}_proj"] for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    rows = []
    for x in hidden:
        shares = (weights["gate"] @ x).softmax(-1)
        chosen = shares.argsort(descending=True)[:2].tolist()
        routed = sum(shares[expert] * mlp(x, f"experts.{expert}") for expert in chosen)
        rows.append(routed + torch.sigmoid(weights["shared_expert_gate"] @ x) * mlp(x, "shared_expert"))
    return torch.stack(rows)


def test_each_token_is_the_sum_of_its_experts_and_the_shared_one(folder: Path) -> None:
    torch.testing.assert_close(load(folder, placement(SingleRank()))(TOKENS), by_hand(TOKENS))


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up_to_the_mixture_in_one_sum(size: int, expert_parallel: bool, folder: Path) -> None:
    ranks = [Rank(rank, size) for rank in range(size)]
    parts = [load(folder, placement(rank, expert_parallel))(TOKENS) for rank in ranks]
    torch.testing.assert_close(torch.stack(parts).sum(0), by_hand(TOKENS))
    assert [rank.num_sums for rank in ranks] == [1] * size


@pytest.mark.parametrize(("rank", "own"), [(0, (0, 1)), (1, (2, 3, 4))])
def test_an_expert_parallel_rank_reads_its_experts_alone(rank: int, own: tuple[int, ...], tmp_path: Path) -> None:
    tensors = mixture_tensors()
    for name, tensor in tensors.items():
        if ".experts." in name and int(name.split(".")[3]) not in own:
            tensors[name] = tensor.to(torch.int8)  # refused by whoever takes it
    save_file(tensors, tmp_path / "model.safetensors")
    mixture = load(tmp_path, placement(Rank(rank, 2), expert_parallel=True))
    assert tuple(mixture.local) == own
    with pytest.raises(CheckpointError, match=r"torch\.int8"):
        load(tmp_path, placement(Rank(1 - rank, 2), expert_parallel=True))


def test_experts_go_round_as_evenly_as_they_can() -> None:
    ranges = [local_experts(60, placement(Rank(rank, 8), expert_parallel=True)) for rank in range(8)]
    assert [expert for local in ranges for expert in local] == list(range(60))
    assert {len(local) for local in ranges} == {7, 8}


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--tensor-parallel-size is 6, but the model has 5 experts"):
        local_experts(5, placement(Rank(0, 6), expert_parallel=True))
    assert local_experts(5, placement(Rank(4, 5), expert_parallel=True)) == range(4, 5)


def test_inner_features_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    save_file(mixture_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"24 inner features of each expert"):
        load(tmp_path, placement(Rank(0, 5)))


def test_fused_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    tensors = fused(mixture_tensors())
    tensors["layer.mlp.experts.down_proj"] = tensors["layer.mlp.experts.down_proj"][1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'layer.mlp.experts.down_proj' has shape \[4, 32, 24\], expected \[5"):
        load(tmp_path, placement(SingleRank()))


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["cut", "whole"])
def test_the_compiled_kernels_stay_close_in_bfloat16(expert_parallel: bool, folder: Path) -> None:
    """Also with 12 inner features, the half of an expert's 24: the panels pad them to 32."""
    parts = [
        load(folder, placement(Rank(rank, 2), expert_parallel, cpu_ops(), dtype=torch.bfloat16))(TOKENS.bfloat16())
        for rank in range(2)
    ]
    torch.testing.assert_close((parts[0] + parts[1]).float(), by_hand(TOKENS), atol=0.3, rtol=0.05)


class ShapesOnly(TorchDispatchMode):
    """Notes the sizes of all that torch makes, and refuses to look into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(func.overloadpacket) not in ("aten._local_scalar_dense", "aten.nonzero"), func
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.sizes.append(tuple(result.shape))
        return result


def test_no_host_looks_at_the_routing_on_a_gpu_and_no_memory_depends_on_it(tmp_path: Path) -> None:
    """So that a CUDA graph holds the step, and the memory measured with one routing is enough for any other."""
    save_file(mixture_tensors(), tmp_path / "model.safetensors")
    mixture = load(tmp_path, placement(SingleRank(), ops=triton_ops(), make_grouped_weight=TritonExperts))
    same_token = TOKENS[:1].repeat(len(TOKENS), 1)
    with ShapesOnly() as spread:
        outputs = mixture(TOKENS)
    with ShapesOnly() as together:
        mixture(same_token)
    torch.testing.assert_close(outputs, by_hand(TOKENS), atol=1e-4, rtol=1e-4)
    assert spread.sizes == together.sizes


@pytest.mark.gpu
@torch.inference_mode()
def test_a_cuda_graph_follows_the_routing_of_its_inputs(tmp_path: Path) -> None:
    save_file(mixture_tensors(), tmp_path / "model.safetensors")
    mixture = load(tmp_path, placement(SingleRank(), ops=triton_ops(), device="cuda"))
    hidden = TOKENS.cuda()
    mixture(hidden)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = mixture(hidden)
    for tokens in (TOKENS.flip(0), TOKENS[:1].repeat(len(TOKENS), 1)):
        hidden.copy_(tokens)
        graph.replay()
        torch.testing.assert_close(outputs.cpu(), by_hand(tokens), atol=1e-4, rtol=1e-4)
