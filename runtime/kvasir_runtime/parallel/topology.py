"""Which rank does what: tensor ranks share every layer, pipeline stages share out the layers. Pure arithmetic.

Tensor ranks are neighbours (rank = pipeline_rank * tensor_size + tensor_rank), and nodes hold equal runs of ranks, so
that the many small collectives of tensor parallelism stay within a node.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One engine's ranks, over all of its nodes."""

    tensor_size: int = 1
    pipeline_size: int = 1
    layer_partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: as equal as may be."""
    num_nodes: int = 1
    """Divides the number of ranks."""
    expert_parallel: bool = False
    """Whether tensor ranks share out whole experts, instead of cutting each."""
    data_size: int = 1
    """Engines like this one on the same nodes."""
    data_rank: int = 0
    """Which of them it is."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def local_world_size(self) -> int:
        """Ranks of a node, those of all engines."""
        return self.ranks_per_node * self.data_size

    @property
    def reporter(self) -> int:
        """The one rank whose results the engine core reads: the last stage's first."""
        return self.num_ranks - self.tensor_size

    def places(self, node: int | None = None) -> list["RankPlace"]:
        """Of a node's ranks; None: of all."""
        per_node = self.ranks_per_node
        ranks = range(self.num_ranks) if node is None else range(node * per_node, (node + 1) * per_node)
        return [RankPlace(self, rank) for rank in ranks]


@dataclass(frozen=True, slots=True)
class RankPlace:
    topology: Topology
    rank: int

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
    def index_on_node(self) -> int:
        """Among the ranks of its node and engine."""
        return self.rank % self.topology.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Among the ranks of its node, those of other engines before it."""
        return self.topology.data_rank * self.topology.ranks_per_node + self.index_on_node

    @property
    def tensor_group(self) -> range:
        """Ranks that share this one's layers."""
        first = self.pipeline_rank * self.tensor_size
        return range(first, first + self.tensor_size)

    @property
    def tensor_group_shares_a_node(self) -> bool:
        group = self.tensor_group
        return group[0] // self.topology.ranks_per_node == group[-1] // self.topology.ranks_per_node
