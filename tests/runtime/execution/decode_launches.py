"""Launches of a steady decode step on CUDA, counted with no GPU: the real worker loads, captures its graphs and runs
steps over fake CUDA tensors, while every operator and Triton kernel is noted. Prints a table, or JSON for the test.

A CPU's tensors are real, a device's have shapes only: what comes back from it is ones, a number that is read is 0.

    PYTHONPATH=runtime:. python tests/runtime/execution/decode_launches.py [--json] [METHOD ...]
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# While ours are imported: fake tensors know no inference mode.
inference_mode, torch.inference_mode = torch.inference_mode, torch.no_grad  # type: ignore[misc,assignment]

from triton.runtime.jit import JITFunction  # noqa: E402

from kvasir_runtime.config import (  # noqa: E402
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kvasir_runtime.execution.executor import StepRunner  # noqa: E402
from kvasir_runtime.execution.synthetic_steps import GREEDY, decode_step  # noqa: E402
from kvasir_runtime.execution.worker import load_worker  # noqa: E402
from kvasir_runtime.requests.sampling_params import SamplingParams  # noqa: E402
from kvasir_runtime.speculative.select import proposer_of  # noqa: E402

torch.inference_mode = inference_mode  # type: ignore[misc]

MODELS = "examples/models/"
NUM_DRAFTS, NUM_SEQUENCES, MAX_NUM_SEQS, CONTEXT = 3, 2, 8, 20
SAMPLINGS = {"greedy": GREEDY, "top_p": SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)}
LAUNCH_NOTHING = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
    "device",
}
READ_NUMBERS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}


@dataclass
class Launches:
    """Of a step."""

    before: Counter[str] = field(default_factory=Counter)
    """Kernels before the first graph."""
    after: Counter[str] = field(default_factory=Counter)
    """Kernels after it, those of matrix products apart."""
    num_products: int = 0
    num_graphs: int = 0
    num_uploads: int = 0
    num_downloads: int = 0
    host_reads: list[str] = field(default_factory=list)
    """What waits for the device."""

    def note(self, name: str) -> None:
        is_product = self.num_graphs and name in ("mm", "addmm", "linear", "bmm", "_few_rows_kernel")
        if is_product:
            self.num_products += 1
        else:
            (self.after if self.num_graphs else self.before)[name] += 1


class ShapesAlone(fake_tensor.FakeTensorMode):
    avoid_device_init = True
    """Although torch is told that there is a device."""


class FakeCuda(TorchDispatchMode):
    """A device that computes nothing and notes everything in `launches`."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Launches()
        self.events: list[dict[str, Any]] = []
        """Keyword arguments of each event."""
        self._is_capturing = False
        fake_tensor.init_gpu_context = lambda device: None
        JITFunction.run = self._run_kernel(JITFunction.run)  # type: ignore[method-assign]
        Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign,assignment]
        for name, replacement in {
            "is_available": lambda: True,
            "get_device_properties": lambda device: SimpleNamespace(
                multi_processor_count=132, shared_memory_per_block_optin=232448, major=9, minor=0
            ),
            "mem_get_info": lambda *device: (70 * 2**30, 80 * 2**30),
            "memory_allocated": lambda: 0,
            "max_memory_allocated": lambda: 0,
            "reset_peak_memory_stats": lambda: None,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "Stream": lambda device: SimpleNamespace(wait_stream=lambda stream: None),
            "current_stream": lambda device: None,
            "stream": lambda stream: nullcontext(),
            "Event": self._event,
            "graph_pool_handle": lambda: None,
            "CUDAGraph": lambda: SimpleNamespace(replay=self._replay),
            "graph": self._capture,
        }.items():
            setattr(torch.cuda, name, replacement)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        name = func.overloadpacket.__name__
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        is_on_device = any(tensor.device.type == "cuda" for tensor in given)
        target = kwargs.get("device")
        if not is_on_device and (target is None or torch.device(target).type == "cpu"):
            with fake_tensor.unset_fake_temporarily():
                return args[0] if name == "_pin_memory" else func(*args, **kwargs)
        if name in READ_NUMBERS:
            self.launches.host_reads.append(name)
            return 0
        if is_on_device and target is not None and torch.device(target).type == "cpu":
            self.launches.num_downloads += 1
            if not kwargs.get("non_blocking"):
                self.launches.host_reads.append("copy to the host")
            with fake_tensor.unset_fake_temporarily():
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        made = func(*args, **kwargs)
        is_empty = not any(isinstance(value, Tensor) and value.numel() for value in tree_leaves(made))
        if any(tensor.device.type == "cpu" and tensor.ndim for tensor in given):
            self.launches.num_uploads += 1
        elif not is_empty and not func.is_view and name.rstrip("_") not in LAUNCH_NOTHING and not self._is_capturing:
            self.launches.note(name.rstrip("_") if not name.startswith("_") else name)
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        ):
            self.launches.host_reads.append("a mask as an index")
        return made

    def _run_kernel(self, compile_and_launch: Any) -> Any:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            for arg in args:
                assert not isinstance(arg, Tensor) or arg.device.type == "cuda", f"{kernel.__name__} is given {arg}"
            if not self._is_capturing:
                self.launches.note(kernel.__name__)

        return run

    def _event(self, **options: Any) -> Any:
        self.events.append(options)
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None)

    @contextmanager
    def _capture(self, graph: Any, **options: Any) -> Iterator[None]:
        before, self.launches, self._is_capturing = self.launches, Launches(), True
        yield
        found, self.launches, self._is_capturing = self.launches, before, False
        assert not found.host_reads, f"in a capture: {found.host_reads}"
        assert not found.num_uploads
        assert not found.num_downloads

    def _replay(self) -> None:
        self.launches.num_graphs += 1


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["none"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    device = FakeCuda()
    found = {}
    for method in options.methods:
        with ShapesAlone(allow_non_fake_inputs=True), device:
            runner, num_drafts = load(None if method == "none" else method)
            for name, sampling in SAMPLINGS.items():
                found[f"{method}, {name}"] = steady_step(device, runner, num_drafts, sampling)
    assert device.events
    assert all(event == {"blocking": True} for event in device.events), "who waits for a result must sleep"
    print(json.dumps({name: vars(launches) for name, launches in found.items()}) if options.json else table(found))


def load(method: str | None) -> tuple[StepRunner, int]:
    """A worker with all its graphs, and the drafts of its steps."""
    speculative = None
    if method is not None:
        own = f"{MODELS}kvasir-python-700k" if method == "draft_model" else f"{MODELS}kvasir-python-7m-{method}"
        speculative = SpeculativeConfig(method=method, num_speculative_tokens=NUM_DRAFTS, model=own)  # type: ignore[arg-type]
    execution = ExecutionConfig(num_threads=1, speculative_config=speculative)
    worker = load_worker(
        ModelConfig(model=f"{MODELS}kvasir-python-7m", device="cuda", dtype="bfloat16"),
        CacheConfig(block_size=16, num_gpu_blocks_override=600),
        execution,
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512),
        proposer_of(execution),
    )
    while worker.runner.use_idle_time():
        pass
    return worker.runner, 0 if method is None else NUM_DRAFTS


def steady_step(device: FakeCuda, runner: StepRunner, num_drafts: int, sampling: SamplingParams) -> Launches:
    """The last of some steps of the same sequences."""
    first = decode_step(NUM_SEQUENCES, num_drafts, CONTEXT, sampling)
    for number in range(4):
        device.launches = Launches()
        runner.forward(first if number == 0 else msgspec.structs.replace(first, added=(), starts=first.starts + number))
        pending = runner.sample()
    launches, device.launches = device.launches, Launches()
    pending.result()
    return launches


def table(found: dict[str, Launches]) -> str:
    lines = [
        "| step | before the graph | graphs | products after | kernels after | copies to the host | uploads, reads |"
    ]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    lines += [
        f"| {name} | {one.before.total()} | {one.num_graphs} | {one.num_products} | {one.after.total()} "
        f"| {one.num_downloads} | {one.num_uploads + len(one.host_reads)} |"
        for name, one in found.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
