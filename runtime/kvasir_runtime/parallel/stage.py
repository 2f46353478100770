"""Which layers a pipeline stage computes (Huang et al. 2019, "GPipe"). Pure arithmetic."""

from dataclasses import dataclass

from kvasir_runtime.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the runs of layers that a decoder is cut into."""

    index: int = 0
    num_stages: int = 1
    partition: tuple[int, ...] | None = None
    """Layers of each stage; None: as equal as may be."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Its own. What does not divide goes to the stages before the last one, which has the head besides. Raises
        ConfigurationError."""
        if self.partition is not None:
            return self._partitioned(self.partition, num_layers)
        if num_layers < self.num_stages:
            raise ConfigurationError(
                f"--pipeline-parallel-size is {self.num_stages}, but the model has {num_layers} layers, and each stage "
                f"needs one: pass at most {num_layers}"
            )
        each, rest = divmod(num_layers, self.num_stages)
        first_larger = max(0, self.num_stages - 1 - rest)
        start = self.index * each + max(0, min(self.index - first_larger, rest))
        is_larger = first_larger <= self.index < first_larger + rest
        return range(start, start + each + is_larger)

    def _partitioned(self, partition: tuple[int, ...], num_layers: int) -> range:
        if sum(partition) != num_layers:
            raise ConfigurationError(
                f"--pipeline-layer-partition is {','.join(map(str, partition))}, which is {sum(partition)} layers, but "
                f"the model has {num_layers}: write numbers that add up to {num_layers}"
            )
        start = sum(partition[: self.index])
        return range(start, start + partition[self.index])


WHOLE = Stage()
"""The only stage: all layers, embedding and head."""
