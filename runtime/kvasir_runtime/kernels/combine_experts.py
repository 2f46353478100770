"""The weighted sum of what its experts made of each token."""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.expert_routing import Routing
from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin


def combine_experts_reference(outputs: torch.Tensor, routing: Routing, local: range) -> torch.Tensor:
    """Return [T, H] for outputs [T * top_k, H] in the order of the pairs.

    Those of experts outside `local` are undefined and add nothing: another rank has them.
    """
    is_local = (routing.experts >= local.start) & (routing.experts < local.stop)
    of_tokens = outputs.view(*routing.experts.shape, -1).float()
    weighted = torch.where(is_local.unsqueeze(-1), of_tokens * routing.weights.unsqueeze(-1), 0.0)
    return weighted.sum(dim=1).to(outputs.dtype)


def cpu_combine_experts(library: CDLL) -> Callable[[torch.Tensor, Routing, range], torch.Tensor]:
    """The compiled combine_experts."""
    native = library.kvasir_combine_experts

    def combine_experts(outputs: torch.Tensor, routing: Routing, local: range) -> torch.Tensor:
        if outputs.dtype not in DTYPE_CODES or not outputs.is_contiguous():
            warn_of_twin("combining experts", f"their outputs are {outputs.dtype} with strides {outputs.stride()}")
            return combine_experts_reference(outputs, routing, local)
        (num_tokens, top_k), width = routing.experts.shape, outputs.shape[1]
        out = torch.empty((num_tokens, width), dtype=outputs.dtype)
        native(
            *(DTYPE_CODES[outputs.dtype], outputs.data_ptr(), routing.weights.data_ptr(), routing.experts.data_ptr()),
            *(local.start, len(local), out.data_ptr(), num_tokens, top_k, width),
        )
        return out

    return combine_experts
