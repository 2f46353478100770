"""What each test file takes: the ten slowest are shown, and a run fails where one exceeds `--file-seconds`.

A file's time is the wall time of its tests with their fixtures; a fixture of a session counts where it is first used.
Files are what the processes of `make test` divide among them, so one long file makes the whole run long.
"""

from collections import defaultdict

import pytest

SHOWN = 10


class FileTimes:
    """Adds up reports; with processes of pytest-xdist it lives in the one that gathers them."""

    def __init__(self, budget_seconds: float | None) -> None:
        """None: no file is too slow."""
        self._budget_seconds = budget_seconds
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._over_budget() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._seconds:
            return
        whole = sum(self._seconds.values())
        terminalreporter.section(f"slowest {SHOWN} of {len(self._seconds)} files, which took {whole:.0f} s together")
        for file, seconds in self._slowest()[:SHOWN]:
            terminalreporter.line(f"{seconds:7.1f} s  {file}")
        for file, seconds in self._over_budget():
            terminalreporter.line(
                f"FAILED {file} took {seconds:.1f} s, and a file has {self._budget_seconds:.0f}: share its servers "
                "and models, wait for conditions, or mark what must be slow with `slow` (`make test-full` runs it)",
                red=True,
            )

    def _slowest(self) -> list[tuple[str, float]]:
        return sorted(self._seconds.items(), key=lambda entry: -entry[1])

    def _over_budget(self) -> list[tuple[str, float]]:
        if self._budget_seconds is None:
            return []
        return [(file, seconds) for file, seconds in self._slowest() if seconds > self._budget_seconds]
