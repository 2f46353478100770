import numpy as np

from kvasir_runtime.execution.philox import philox4x32, uniform


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def test_known_answers_of_the_random123_library() -> None:
    zeros = philox4x32(words(0, 0, 0, 0), words(0, 0))
    ones = philox4x32(words(*[0xFFFFFFFF] * 4), words(*[0xFFFFFFFF] * 2))
    assert [int(word[0]) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word[0]) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_draw_depends_on_its_own_seed_and_position_alone() -> None:
    seeds = np.array([7, 2**64 - 1, 7], dtype=np.uint64)
    together = uniform(seeds, np.array([3, 4, 2**33]))
    alone = [uniform(seeds[i : i + 1], np.array([position]))[0] for i, position in enumerate((3, 4, 2**33))]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_draws_are_spread_evenly_over_zero_to_one() -> None:
    draws = uniform(np.full(20_000, 5, dtype=np.uint64), np.arange(20_000))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=10, range=(0, 1))[0]
    assert abs(counts - 2_000).max() < 200  # 4.7 standard deviations
