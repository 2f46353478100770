"""What a stage knows of the whole pipeline: which KV all layers keep, and what has to travel beside hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec, stage_layout
from kvasir_runtime.parallel.stage import Stage
from kvasir_runtime.parallel.stage_link import StageLink


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What one stage tells the others when it is loaded."""

    kv_specs: tuple[KvSpec, ...]
    """Of its layers, on the last stage the proposer's behind them."""
    captured_layers: tuple[int, ...]
    """That its proposer looks into; only the last stage has one."""
    partition: tuple[int, ...] | None
    """As the stage's node was told: all must have been told the same."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    stage: Stage
    link: StageLink
    facts: tuple[StageFacts, ...]
    """Of all stages."""

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return self.facts[-1].captured_layers

    def layout(self, block_size: int) -> KvLayout:
        """Of this stage's pages, and of the tables that all have."""
        ends = list(accumulate((len(facts.kv_specs) for facts in self.facts), initial=0))
        stages = [range(start, end) for start, end in pairwise(ends)]
        specs = [spec for facts in self.facts for spec in facts.kv_specs]
        return stage_layout(specs, block_size, stages, self.stage.index)

    def num_planes(self, next_layer: int) -> int:
        """Of what travels to the stage that begins with this layer: residual stream, and what was captured before."""
        return 1 + sum(layer < next_layer for layer in self.captured_layers)


def join_pipeline(
    stage: Stage, link: StageLink, kv_specs: Sequence[KvSpec], captured_layers: tuple[int, ...]
) -> Pipeline:
    """Waits until all stages are loaded. Raises ConfigurationError where they do not make up the model."""
    own = msgspec.msgpack.encode(StageFacts(tuple(kv_specs), captured_layers, stage.partition))
    facts = tuple(msgspec.msgpack.decode(word, type=StageFacts) for word in link.exchange(own))
    if len({each.partition for each in facts}) > 1:
        told = "; ".join(
            f"stage {index}: {'none' if each.partition is None else ','.join(map(str, each.partition))}"
            for index, each in enumerate(facts)
        )
        raise ConfigurationError(
            f"--pipeline-layer-partition differs between the nodes ({told}); give all nodes the same flags"
        )
    return Pipeline(stage, link, facts)
