"""How far a download is, by a clock that the test turns."""

import pytest

from kvasir_runtime.model_sources.progress import Progress, ProgressMeter, describe


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> ProgressMeter:
    """Of 1000 bytes, of which 200 were there."""
    meter = ProgressMeter("hf://org/name", clock)
    meter.begin(1000)
    meter.add_kept(200)
    meter.sample()
    return meter


def test_what_was_there_counts_as_done_and_not_as_fast(meter: ProgressMeter, clock: Clock) -> None:
    clock.seconds = 10.0
    meter.add_received(300)
    seen = meter.sample()

    assert (seen.bytes_done, seen.bytes_per_second, seen.seconds_left) == (500, 30.0, pytest.approx(500 / 30))


def test_the_first_sample_of_a_download_has_a_rate(meter: ProgressMeter, clock: Clock) -> None:
    meter.begin(1000)
    meter.add_received(100)
    clock.seconds += 5.0
    assert meter.sample().bytes_per_second == 20.0


def test_the_rate_is_that_of_the_last_half_minute(meter: ProgressMeter, clock: Clock) -> None:
    meter.add_received(300)
    for clock.seconds in (10.0, 20.0, 30.0, 40.0):
        seen = meter.sample()

    assert (seen.bytes_per_second, seen.seconds_left) == (0.0, None)


def test_tells_since_when_nothing_came(meter: ProgressMeter, clock: Clock) -> None:
    clock.seconds = 5.0
    meter.add_received(1)
    clock.seconds = 47.0

    assert meter.sample().idle_seconds == 42.0


def test_comparing_what_is_on_disk_is_no_idling(meter: ProgressMeter, clock: Clock) -> None:
    clock.seconds = 40.0
    meter.note_compared(1)
    clock.seconds = 42.0
    seen = meter.sample()

    assert (seen.state, seen.bytes_done, seen.idle_seconds) == ("downloading", 200, 2.0)


def test_with_the_last_byte_checksums_are_all_that_is_left(meter: ProgressMeter, clock: Clock) -> None:
    meter.add_received(800)
    clock.seconds = 60.0
    seen = meter.sample()

    assert (seen.state, seen.seconds_left, seen.idle_seconds) == ("verifying", None, 0.0)


def test_what_is_fetched_again_is_no_longer_done(meter: ProgressMeter) -> None:
    meter.add_received(800)
    meter.add_kept(-500)

    assert (meter.sample().bytes_done, meter.sample().state) == (500, "downloading")


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress("hf://a/b"), "hf://a/b: asks what there is"),
        (Progress("hf://a/b", "waiting"), "hf://a/b: waits for the process that fills the cache"),
        (
            Progress("hf://a/b", "downloading", 5 * 10**9, 20 * 10**9, 1e8, 150.0),
            "hf://a/b: downloading: 5.00 GB of 20.00 GB (25 %), 100.0 MB/s, 150 s left",
        ),
        (Progress("hf://a/b", "verifying", 10**9, 10**9), "hf://a/b: verifying: 1.00 GB of 1.00 GB (100 %)"),
    ],
)
def test_a_line_of_the_log(progress: Progress, line: str) -> None:
    assert describe(progress) == line
