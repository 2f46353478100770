"""The table of scenarios: what clients saw in each, and how long its phases took."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from e2e.traffic.traffic import Verdict


@dataclass
class Verdicts:
    """Filled by the scenarios in their order."""

    rows: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def add(self, scenario: str, verdict: Verdict | None = None, note: str = "", **seconds: float) -> None:
        """`seconds` are named times, e.g. ready_again=4.2; a verdict of None is for what had no traffic."""
        named = [f"{name.replace('_', ' ')} {value:.1f} s" for name, value in seconds.items()]
        times = ", ".join([*named, note] if note else named)
        if verdict is None:
            self.rows.append(f"| {scenario} | | | | | | {times} |")
            return
        counts = " | ".join(str(verdict.count(name)) for name in ("whole", "refused", "cut", "wrong"))
        self.rows.append(f"| {scenario} | {counts} | {verdict.longest_gap_seconds:.1f} | {times} |")

    def phase(self, name: str, seconds: float) -> None:
        """A step of the whole run: a build, the cluster's start, a scenario."""
        self.phases.append(f"| {name} | {seconds:.0f} |")

    def table(self) -> str:
        head = [
            f"Run of {time.strftime('%Y-%m-%d')}.",
            "",
            "| Scenario | whole streams | refused | cut | wrong | longest silence (s) | times |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        phases = ["", "| Phase | seconds |", "| --- | --- |", *self.phases]
        return "\n".join([*head, *self.rows, *phases, ""])

    def write(self, path: Path) -> None:
        path.write_text(self.table())
