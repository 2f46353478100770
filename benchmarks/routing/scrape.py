"""Engines' metrics as a router scrapes them: all at once, at most as old as the interval."""

from benchmarks.routing.engine import Engine

_INTERVAL_SECONDS = 0.05


class Scrape:
    def __init__(self, engines: list[Engine]) -> None:
        self._engines = engines
        self._at = -1.0
        self.num_waiting: list[int] = []
        self.num_in_flight: list[int] = []
        self.kv_usage: list[float] = []

    def refresh(self, now: float) -> None:
        if now - self._at < _INTERVAL_SECONDS and self._at >= 0:
            return
        self._at = now
        self.num_waiting = [len(engine.waiting) for engine in self._engines]
        self.num_in_flight = [engine.num_in_flight for engine in self._engines]
        self.kv_usage = [engine.kv_usage for engine in self._engines]
