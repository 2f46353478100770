"""How many threads replay a step: as many as the machine has cores for at the time, with the same numbers."""

import ctypes

import pytest
import torch
from tests.runtime.kernels.test_batch_invariance import LINEAR_PATHS, noise

from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kernels.native import load_library

STEP_SECONDS = 0.04
"""Of one thread alone."""
MOST_PAUSE = 2.0


class TeamSize(ctypes.Structure):
    """Its front, as team_size.h has it."""

    _fields_ = (("most", ctypes.c_int64), ("threads", ctypes.c_int64), ("rest", ctypes.c_byte * 128))


class Machine:
    """Replays on some cores, of which others may have some: whoever shares a core keeps all waiting."""

    def __init__(self, num_cores: int, *, barrier_seconds: float = 0.0, can_spin: bool = True) -> None:
        self.num_cores = self.num_free = num_cores
        self.barrier_seconds = barrier_seconds
        self.can_spin = can_spin
        self.size = TeamSize()
        self.now = 0.0
        self.work(0.0)

    @property
    def num_threads(self) -> int:
        return self.size.threads

    def work(self, seconds: float) -> dict[int, float]:
        """For so long; the seconds by number of threads."""
        library, spent, end = load_library(), dict.fromkeys(range(self.num_cores + 1), 0.0), self.now + seconds
        assert library is not None
        while True:
            threads = max(1, self.num_threads)
            computed = STEP_SECONDS / threads
            is_late = threads > self.num_free
            wall = computed * (4 if is_late else 1) + self.barrier_seconds * (threads > 1)
            waited = wall - computed
            self.now += wall
            spent[threads] += wall
            on_core = computed + (waited if self.can_spin else 0.1 * waited)
            library.kvasir_team_size_observe(
                ctypes.addressof(self.size), self.num_cores, self.now, wall, on_core, on_core - computed
            )
            if self.now >= end:
                return spent


@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_all_threads_work_where_nobody_else_does(num_cores: int) -> None:
    machine = Machine(num_cores, barrier_seconds=0.0001)
    assert machine.work(5.0)[num_cores] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("can_spin", [False, True])
@pytest.mark.parametrize(("num_cores", "num_taken"), [(2, 1), (4, 1), (8, 1), (8, 3)])
def test_threads_leave_cores_to_neighbours(num_cores: int, num_taken: int, can_spin: bool) -> None:
    machine = Machine(num_cores, can_spin=can_spin)
    machine.work(1.0)
    machine.num_free -= num_taken
    machine.work(2.0)
    assert machine.work(20.0)[machine.num_free] > 0.85 * 20.0


def test_threads_come_back_when_neighbours_have_gone() -> None:
    machine = Machine(8)
    machine.num_free = 5
    machine.work(20.0)
    machine.num_free = 8
    machine.work(2 * MOST_PAUSE)
    assert machine.work(5.0)[8] > 0.9 * 5.0


def test_one_thread_does_where_two_wait_longer_than_they_compute() -> None:
    machine = Machine(2, barrier_seconds=0.03)
    machine.work(2.0)
    assert machine.work(20.0)[1] > 0.9 * 20.0


def test_threads_stay_where_one_less_would_wait_as_long() -> None:
    machine = Machine(8, barrier_seconds=0.003)
    assert machine.work(20.0)[8] > 0.9 * 20.0


@pytest.mark.parametrize("path", [path for path, dtype in LINEAR_PATHS if dtype == torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40, 200])
def test_a_product_does_not_depend_on_the_number_of_threads(path: str, rows: int) -> None:
    linear = make_weight(noise(2064, 384, dtype=torch.bfloat16), path=path)
    x, before, products = noise(rows, 384, dtype=torch.bfloat16, seed=1), torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            products.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert [torch.equal(products[0], product) for product in products] == [True] * 4
