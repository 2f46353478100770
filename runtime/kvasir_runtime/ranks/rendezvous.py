"""Which nodes are awaited while an engine's ranks come together, for how long, and what to check. Reads no clock."""

from kvasir_runtime.parallel.meeting_point import MEETING_TIMEOUT
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.service_secret import SECRET_VARIABLE

WARNING_SECONDS = 30.0
"""Between warnings: a node's image and its processes' libraries take their time."""


class Rendezvous:
    def __init__(self, topology: Topology, meeting_place: str, warning_seconds: float = WARNING_SECONDS) -> None:
        """`meeting_place`: as node 0's flags name it; `warning_seconds`: from one warning to the next."""
        self.num_ranks = topology.num_ranks
        self._nodes = [place.node for place in topology.places()]
        self._meeting_place = meeting_place
        self._awaited = set(range(topology.num_ranks))
        self._waited_seconds = 0.0
        self._warning_seconds = self._next_warning = warning_seconds

    def come(self, rank: int) -> None:
        self._awaited.discard(rank)

    def pass_time(self, seconds: float) -> None:
        self._waited_seconds += seconds

    def warning(self) -> str | None:
        """`missing`, once in a while."""
        if self._waited_seconds < self._next_warning:
            return None
        self._next_warning += self._warning_seconds
        return self.missing()

    def problem(self) -> str | None:
        """`missing`, when there is no hope left."""
        return self.missing() if self._waited_seconds >= MEETING_TIMEOUT.total_seconds() else None

    def missing(self) -> str | None:
        """Who has not come, for how long, and what to check; None: all are there."""
        nodes: dict[int, list[int]] = {}
        for rank in sorted(self._awaited):
            nodes.setdefault(self._nodes[rank], []).append(rank)
        if not nodes:
            return None
        absent = " and ".join(f"node {node} (ranks {', '.join(map(str, ranks))})" for node, ranks in nodes.items())
        return f"after {self._waited_seconds:.0f} seconds {absent} did not come; {self._advice(nodes)}"

    def _advice(self, nodes: dict[int, list[int]]) -> str:
        if min(nodes) == 0:
            return "the ranks of node 0 are processes of its own, and its log says what they wait for"
        return (
            "check that each runs with its --node-rank and else with node 0's flags, that it reaches "
            f"{self._meeting_place} and all other ports of node 0, and that {SECRET_VARIABLE} is the same on all "
            "nodes, or set on none; its own log says more"
        )
