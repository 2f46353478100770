import time

from kvasir_runtime.execution.startup import StartupTimer


def test_a_phase_leaves_out_what_is_measured_within_it() -> None:
    timer = StartupTimer()
    started = time.perf_counter()
    with timer.measure("outer"):
        for _ in range(2):
            with timer.measure("inner"):
                time.sleep(0.02)
    elapsed = time.perf_counter() - started
    assert 0.04 <= timer.seconds["inner"] <= elapsed
    assert 0 <= timer.seconds["outer"] <= elapsed - timer.seconds["inner"]
