"""A recording does again what was done, on what its inputs hold then; what cannot be done again is refused."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.ops import cpu_ops
from kvasir_runtime.kernels.recording import Arena, Recorder, Recording, RecordingError
from kvasir_runtime.kernels.step_ops import cpu_step_ops


def record(compute: Callable[[], Any], arena: Arena | None = None) -> tuple[Recording, Any]:
    library = load_library()
    assert library is not None
    with Recorder(library, Arena() if arena is None else arena) as recorder:
        output = compute()
    return recorder.recording(), output


def replay(recording: Recording) -> None:
    for call in recording.calls:
        call()


def problem_of(compute: Callable[[], Any]) -> str:
    with pytest.raises(RecordingError) as caught:
        record(compute)
    return str(caught.value)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_kernels_and_operators_run_again_in_their_order() -> None:
    ops, x, residual, weight = cpu_ops(), noise(3, 8), noise(3, 8, seed=1), noise(8, seed=2)

    def compute() -> Tensor:
        normed, stream = ops.add_rms_norm(x, residual, weight, 0.25)
        doubled = torch.cat((normed, stream), dim=1) * 2
        doubled[:, 0] += 1
        return ops.silu_and_mul(doubled)

    recording, output = record(compute)
    for seed in (3, 4):
        x.copy_(noise(3, 8, seed=seed))
        residual.copy_(noise(3, 8, seed=seed + 10))
        replay(recording)
        replayed, replayed_residual = output.clone(), residual.clone()
        residual.copy_(noise(3, 8, seed=seed + 10))
        assert torch.equal(replayed, compute())
        assert torch.equal(replayed_residual, residual)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_kernels_in_a_row_share_their_work_among_all_threads(num_threads: int) -> None:
    """Which stay awake from one to the next: each must have ended before the next begins, over and over."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        ops, x, residual, weight = cpu_ops(), noise(600, 256), noise(600, 256, seed=1), noise(256, seed=2)

        def compute() -> Tensor:
            normed = x
            for _ in range(5):
                normed, _ = ops.add_rms_norm(normed, residual, weight, 0.25)
                normed = ops.silu_and_mul(torch.cat((normed, normed), dim=1))
            return normed

        recording, output = record(compute)
        for seed in range(20):
            x.copy_(noise(600, 256, seed=seed))
            residual.copy_(noise(600, 256, seed=seed + 100))
            replay(recording)
            replayed = output.clone()
            residual.copy_(noise(600, 256, seed=seed + 100))
            assert torch.equal(replayed, compute())
    finally:
        torch.set_num_threads(before)


def test_recording_does_not_load_torchs_compiler() -> None:
    """Which takes seconds, in which no stream would go on."""
    program = """
import sys, torch
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.recording import Arena, Recorder

with torch.inference_mode(), Recorder(load_library(), Arena()) as recorder:
    torch.ones(3) * 2
print(len(recorder.recording().calls), "torch._dynamo" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "2 False\n"


def test_nothing_is_noted_after_the_recording() -> None:
    ops, x, weight = cpu_ops(), noise(1, 8), noise(8)
    recording, output = record(lambda: ops.rms_norm(x, weight, 1e-6))
    ops.rms_norm(noise(1, 8, seed=5), weight, 1e-6)
    torch.ones(3).add_(1)
    assert len(recording.calls) == 1
    x.copy_(noise(1, 8, seed=6))
    replay(recording)
    assert torch.equal(output, ops.rms_norm(x, weight, 1e-6))


def test_a_computation_of_views_alone_is_no_call() -> None:
    x = noise(8)
    recording, _ = record(lambda: x.view(4, 2).split([1, 3])[1].unsqueeze(0))
    assert recording.calls == []
    replay(recording)


@pytest.mark.parametrize(
    "look",
    [Tensor.tolist, Tensor.item, Tensor.numpy, bool, int, float, lambda x: [0, 1, 2][x], lambda x: x.__array__()],
    ids=["tolist", "item", "numpy", "bool", "int", "float", "index", "array"],
)
def test_numbers_read_on_the_host_are_refused(look: Callable[[Tensor], Any]) -> None:
    x = torch.ones((), dtype=torch.int64)
    assert problem_of(lambda: look(x)).endswith("passes numbers between torch and the host")


def test_numbers_brought_from_the_host_are_refused() -> None:
    assert problem_of(lambda: torch.tensor([1])).endswith("passes numbers between torch and the host")


def test_operators_whose_shapes_depend_on_numbers_are_refused() -> None:
    x, mask = noise(4), torch.tensor([True, False, True, True])
    assert "nonzero" in problem_of(lambda: x.nonzero())
    assert "index" in problem_of(lambda: x[mask])


def test_rows_are_looked_up_again() -> None:
    table, index = noise(5, 3), torch.tensor([4, 0])
    recording, output = record(lambda: table[index])
    index.copy_(torch.tensor([1, 2]))
    replay(recording)
    assert torch.equal(output, table[1:3])


def test_kernels_that_are_not_made_for_it_are_refused() -> None:
    ops, logits = cpu_step_ops(), noise(1, 8)
    assert problem_of(lambda: ops.argmax(logits)) == "kvasir_argmax is not made to be called again"


def test_the_first_problem_is_told_and_the_computation_goes_on() -> None:
    x, seen = noise(4), []

    def compute() -> None:
        seen.append(x.tolist())
        seen.append(x.nonzero())

    assert "tolist" in problem_of(compute)
    assert len(seen) == 2


def test_recordings_of_one_arena_share_its_memory() -> None:
    arena, ops, weight = Arena(), cpu_ops(), noise(8)
    x, y = noise(2, 8), noise(2, 8, seed=1)
    arena.begin()
    first, of_x = record(lambda: ops.rms_norm(x, weight, 1e-6), arena)
    taken = arena.num_bytes
    arena.begin()
    second, of_y = record(lambda: ops.rms_norm(y, weight, 1e-6), arena)
    assert of_x.data_ptr() == of_y.data_ptr()
    assert arena.num_bytes == taken
    replay(first)
    assert torch.equal(of_x, ops.rms_norm(x, weight, 1e-6))
    replay(second)
    assert torch.equal(of_y, ops.rms_norm(y, weight, 1e-6))


@pytest.mark.parametrize("num_bytes", [0, 1, 4 << 20, (4 << 20) + 1])
def test_an_arena_grows_by_what_is_taken(num_bytes: int) -> None:
    arena = Arena()
    taken = arena.take([num_bytes], torch.uint8)
    assert taken.shape == (num_bytes,)
    assert num_bytes <= arena.num_bytes <= max(4 << 20, num_bytes + 64)


def test_what_is_taken_from_an_arena_does_not_overlap_and_is_aligned() -> None:
    arena = Arena()
    parts = [arena.take([3, 5], torch.bfloat16), arena.take([1], torch.float32), arena.take([5 << 20], torch.uint8)]
    parts.append(arena.take([2], torch.int64))
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.unique().tolist() for part in parts] == [[0], [1], [2], [3]]
    assert all(part.data_ptr() % 64 == 0 for part in parts)
