"""What the prefix cache gains and loses, for those who route by it: plain events in vLLM's shapes, in order.

A block is reported as stored when the step that writes it has ended, not when its hash becomes findable because such a
step is planned (docs/decisions/0011-planned-and-written.md); what a failed step takes back was never reported. The
parent of a block that is stored is there: readers know a block by those before it. One KV group speaks for all. Nothing
is sent from here: whoever wants the events takes them, once a step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvasir_runtime.kv_cache.spec import KvGroup

DEVICE_MEDIUM = "GPU"
"""vLLM's word for blocks in the memory that the engine computes in, on a CPU too."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive full blocks of one sequence that can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before the first; None where that begins a sequence."""
    token_ids: list[int]
    """Of all blocks, in order."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE_MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """One entry a block: what else its own hash covers (a cache salt, in the first block of a sequence)."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that cannot be found any more: their memory was needed."""

    block_hashes: list[bytes]
    medium: str | None = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step."""

    ts: float
    """Seconds since the epoch."""
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class AnnouncedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that can be found already, and is yet to be written. One is made for each block: a struct takes a
    quarter of the time of a dataclass."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: list[int]
    extra_keys: tuple[bytes, ...]
    """Empty but for the first block of a sequence."""


class KvEventLog:
    """Begins with AllBlocksCleared, so that readers forget what an engine before this one held."""

    def __init__(self, block_size: int, groups: Sequence[KvGroup]) -> None:
        self.group = reported_group(groups)
        self._has_gaps = not groups[self.group].reach.is_full
        """Whether a block may be there without its parent, which lies behind the window."""
        self._block_size = block_size
        self._announced: dict[int, AnnouncedBlock | None] = {}
        """By block id; None: of another group."""
        self._num_overdue: Counter[int] = Counter()
        """Of each block: steps under way that were to write what has been forgotten since."""
        self._stored: set[bytes] = set()
        """Hashes of the blocks that readers know to be there."""
        self._events: list[KvEvent] = [AllBlocksCleared()]

    def announce(self, block_id: int, block: AnnouncedBlock | None) -> None:
        """A block has become findable; None stands for one of another group than the reported one."""
        self._announced[block_id] = block

    def wrote(self, block_ids: Iterable[int]) -> list[int]:
        """The step that these blocks were announced for has ended. Other groups' say nothing, nor do those that were
        forgotten meanwhile. Returns those that are left out because their parents were lost: they are to be forgotten.
        """
        orphans: list[int] = []
        stored: BlockStored | None = None
        for block_id in block_ids:
            block = self._take_announced(block_id)
            if block is None:
                continue
            if stored is not None and stored.block_hashes[-1] == block.parent_hash:
                self._append(stored, block)
            elif self._has_gaps or block.parent_hash is None or block.parent_hash in self._stored:
                stored = self._begin(block)
                self._events.append(stored)
            else:
                orphans.append(block_id)
                continue
            self._stored.add(block.block_hash)
        return orphans

    def forget(self, block_id: int, group: int, block_hash: bytes) -> None:
        """A findable block of any group cannot be found any more."""
        if block_id in self._announced:
            del self._announced[block_id]
            self._num_overdue[block_id] += 1
        elif group == self.group and block_hash in self._stored:
            self._stored.remove(block_hash)
            self._remove(block_hash)

    def lose_steps(self) -> None:
        """No step under way will end, and what they were to write has been forgotten."""
        self._num_overdue.clear()

    def take(self) -> list[KvEvent]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events

    def _take_announced(self, block_id: int) -> AnnouncedBlock | None:
        if self._num_overdue and self._num_overdue[block_id]:  # nearly always there are none at all
            self._num_overdue[block_id] -= 1
            return None
        return self._announced.pop(block_id, None)

    def _remove(self, block_hash: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash]))

    def _begin(self, block: AnnouncedBlock) -> BlockStored:
        keys = tuple(key.decode() for key in block.extra_keys)
        return BlockStored(
            [block.block_hash],
            block.parent_hash,
            list(block.token_ids),
            self._block_size,
            extra_keys=[keys] if keys else None,
        )

    @staticmethod
    def _append(stored: BlockStored, block: AnnouncedBlock) -> None:
        """A block that follows the last one, and so has no extra keys of its own."""
        stored.block_hashes.append(block.block_hash)
        stored.token_ids.extend(block.token_ids)
        if stored.extra_keys is not None:
            stored.extra_keys.append(None)


def reported_group(groups: Sequence[KvGroup]) -> int:
    """The last of those that keep all tokens, else the last: what a router compares is whole prefixes, and of blocks
    released together the last group's are reused first, so what is reported as there is lost no later than the rest.
    """
    full = [index for index, group in enumerate(groups) if group.reach.is_full]
    return full[-1] if full else len(groups) - 1
