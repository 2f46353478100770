"""Counter-based numbers: the published answers."""

import torch

from kvasir_runtime.kernels.philox import philox4x32
from kvasir_runtime.kernels.philox import uniform_reference as uniform


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def test_known_answers_of_the_random123_library() -> None:
    zeros = philox4x32(words(0, 0, 0, 0), words(0, 0))
    ones = philox4x32(words(*[0xFFFFFFFF] * 4), words(*[0xFFFFFFFF] * 2))
    assert [int(word[0]) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word[0]) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_draw_is_the_48_upper_bits_of_its_counters_first_words() -> None:
    assert uniform(torch.tensor([0]), torch.tensor([0])).item() == 0x6627E8D5E169 * 2.0**-48


def test_every_bit_of_seed_and_position_counts() -> None:
    bits = torch.tensor([2**i if i < 63 else -(2**63) for i in range(64)])
    zeros = torch.zeros_like(bits)
    draws = torch.cat((uniform(bits, zeros), uniform(zeros, bits), uniform(zeros[:1], zeros[:1])))
    assert len(set(draws.tolist())) == 129


def test_a_draw_depends_on_its_own_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([7, -1, 7]), torch.tensor([3, 4, 2**33])
    together = uniform(seeds, positions).tolist()
    assert together == [uniform(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(3)]


def test_draws_are_spread_evenly_over_zero_to_one() -> None:
    draws = uniform(torch.full((20_000,), 5), torch.arange(20_000))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = torch.histc(draws, bins=10, min=0, max=1)
    assert (counts - 2_000).abs().max() < 200  # 4.7 standard deviations
