"""What the suite does with itself: budgets of files, rooms in one process, tests that run alone."""

from pathlib import Path
from threading import Thread

import pytest
from tests.file_times import FileTimes
from tests.side_by_side import TakingTurns, order_of

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("seconds", "outcome"), [(60.0, pytest.ExitCode.OK), (0.0, pytest.ExitCode.TESTS_FAILED)])
def test_a_run_fails_where_a_file_exceeds_its_budget(
    pytester: pytest.Pytester, seconds: float, outcome: pytest.ExitCode
):
    pytester.makepyfile(test_quick="def test_nothing(): pass")

    run = pytester.inline_run(plugins=[FileTimes(seconds)])

    assert run.ret == outcome


def test_a_run_shows_its_slowest_files(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]):
    pytester.makepyfile(test_quick="def test_nothing(): pass")

    pytester.inline_run(plugins=[FileTimes(0.0)])

    printed = capsys.readouterr().out
    assert "slowest 10 of 1 files" in printed
    assert "FAILED test_quick.py took" in printed


def test_rooms_that_share_servers_come_first():
    tests = ["tests/browser/test_a.py::a", "tests/local/test_b.py::b", "tests/controlplane/test_c.py::c"]

    assert sorted(tests, key=order_of) == list(reversed(tests))


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [("test_alone", "test_plain", True), ("test_plain", "test_alone", True), ("test_plain", "test_plain", False)],
)
def test_a_test_that_is_marked_alone_runs_alone(
    tmp_path: Path, pytester: pytest.Pytester, first: str, second: str, waits: bool
):
    source = "import pytest\n@pytest.mark.alone\ndef test_alone(): pass\ndef test_plain(): pass"
    items = {item.name: item for item in pytester.getitems(source)}
    under_way, other = (TakingTurns(tmp_path).pytest_runtest_protocol(items[name]) for name in (first, second))
    next(under_way)

    starting = Thread(target=next, args=(other,))
    starting.start()
    starting.join(timeout=0.2 if waits else 10)

    assert starting.is_alive() == waits
    under_way.close()
    starting.join(timeout=10)
    assert not starting.is_alive()
    other.close()
