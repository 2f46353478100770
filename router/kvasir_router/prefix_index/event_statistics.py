"""What is counted of the messages that engines publish; it only grows, but for the lag."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EventStatistics:
    num_events: Counter[str] = field(default_factory=Counter)  # by type
    num_skipped: int = 0  # events that are unknown, or about another tier than the device's memory
    num_malformed: int = 0  # messages that cannot be read
    num_load_reports: int = 0
    num_gaps: int = 0
    num_replays: int = 0  # asked for; to see whether something is missing as well
    num_failed_replays: int = 0
    num_losses: int = 0  # gaps that no replay has filled
    lag_seconds: float | None = None  # of the last batch behind its time stamp, as far as the two clocks agree

    def add(self, other: "EventStatistics") -> None:
        """Everything but the lag, which is one engine's."""
        self.num_events.update(other.num_events)
        self.num_skipped += other.num_skipped
        self.num_malformed += other.num_malformed
        self.num_load_reports += other.num_load_reports
        self.num_gaps += other.num_gaps
        self.num_replays += other.num_replays
        self.num_failed_replays += other.num_failed_replays
        self.num_losses += other.num_losses
