"""Which rank does what: tensor ranks share every layer, pipeline stages share out the layers. Pure arithmetic.

Tensor ranks are neighbours (rank = pipeline_rank * tensor_size + tensor_rank), and nodes hold equal runs of ranks, so
that the many small collectives of tensor parallelism stay within a node. With several engines a stage's runs lie one
behind the other, engine by engine: a node has a stage of all of them where it has room, and of one where it has not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One engine's ranks, over all nodes."""

    tensor_size: int = 1
    pipeline_size: int = 1
    layer_partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: as equal as may be."""
    num_nodes: int = 1
    """Divides the number of ranks of all engines."""
    expert_parallel: bool = False
    """Whether tensor ranks share out whole experts, instead of cutting each."""
    data_size: int = 1
    """Engines like this one, itself included, that share the nodes."""
    data_rank: int = 0
    """Which of them it is."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def runs_in_core(self) -> bool:
        """Whether the engine's one rank runs in the core's process: there is surely no other, on any node."""
        return self.num_ranks == 1 and self.num_nodes == 1

    @property
    def local_world_size(self) -> int:
        """Ranks of a node, those of all engines."""
        return self.num_ranks * self.data_size // self.num_nodes

    @property
    def reporter(self) -> int:
        """The one rank whose results the engine core reads: the last stage's first."""
        return self.num_ranks - self.tensor_size

    def places(self, node: int | None = None) -> list["RankPlace"]:
        """Of those of its ranks that a node holds, perhaps none; None: of all."""
        places = [RankPlace(self, rank) for rank in range(self.num_ranks)]
        return [place for place in places if node is None or place.node == node]


@dataclass(frozen=True, slots=True)
class RankPlace:
    topology: Topology
    rank: int

    @property
    def name(self) -> str:
        """For logs, among the ranks of all engines."""
        engine = "" if self.topology.data_size == 1 else f"data-parallel rank {self.topology.data_rank}, "
        return f"{engine}rank {self.rank}"

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.topology.tensor_size

    @property
    def tensor_size(self) -> int:
        return self.topology.tensor_size

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.topology.tensor_size

    @property
    def pipeline_size(self) -> int:
        return self.topology.pipeline_size

    @property
    def is_reporter(self) -> bool:
        return self.rank == self.topology.reporter

    @property
    def node(self) -> int:
        return self._position // self.topology.local_world_size

    @property
    def local_rank(self) -> int:
        """Among the ranks of its node, those of all engines."""
        return self._position % self.topology.local_world_size

    @property
    def tensor_group(self) -> range:
        """Ranks that share this one's layers."""
        first = self.pipeline_rank * self.tensor_size
        return range(first, first + self.tensor_size)

    @property
    def tensor_group_shares_a_node(self) -> bool:
        first, last = (RankPlace(self.topology, self.tensor_group[end]) for end in (0, -1))
        return first.node == last.node

    @property
    def _position(self) -> int:
        """Among the ranks of all engines, in the order in which nodes take them."""
        run = self.pipeline_rank * self.topology.data_size + self.topology.data_rank
        return run * self.tensor_size + self.tensor_rank
