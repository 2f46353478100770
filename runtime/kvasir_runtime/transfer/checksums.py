"""A checksum a page, so that what arrives is what was written: XXH3 with 64 bit.

Where an engine has several ranks, each part of a page that one rank reads from another has its own, and the page's is
their sum: so both sides come to the same, whoever has which parts. It tells damage, and pages that were reused too
early; it is no defence against somebody who wants to deceive.
"""

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from kvasir_runtime.transfer.connector import CHECKSUM_MODULUS, Page, Side
from kvasir_runtime.transfer.page_layout import PageParts, Part


def page_checksums(buffer: Tensor, parts: PageParts, pages: Sequence[Page], num_ranks: int, side: Side) -> list[int]:
    """Of pages of a rank's buffer uint8 [num_blocks, page_bytes], as far as they were read from an engine of so many
    ranks, or are to be read by one; those of a GPU are copied to the host first."""
    sums: list[int] = []
    for page, content in zip(pages, _contents(buffer, pages), strict=True):
        find = parts.to_read if side == "read" else parts.to_be_read
        found = find(page.group, num_ranks)
        sums.append(sum(_part_checksum(content, part, parts, side) for part in found) % CHECKSUM_MODULUS)
    return sums


def _part_checksum(content: memoryview, part: Part, parts: PageParts, side: Side) -> int:
    """Who reads it from whom goes in, and on which pipeline stage, so that no two can be mixed up."""
    rank = parts.place.rank
    reader, writer = (rank, part.rank) if side == "read" else (part.rank, rank)
    digest = xxhash.xxh3_64(seed=parts.stage.index << 32 | reader << 16 | writer)
    if part.segments is None:
        digest.update(content)
    else:
        for segment in part.segments:
            digest.update(content[segment.ours : segment.ours + segment.num_bytes])
    return digest.intdigest()


def _contents(buffer: Tensor, pages: Sequence[Page]) -> Iterable[memoryview]:
    """Bytes of each page."""
    block_ids = [page.block_id for page in pages]
    if buffer.device.type == "cpu":
        whole = buffer.numpy()
        return (whole[block_id].data for block_id in block_ids)
    copies = buffer[torch.tensor(block_ids, device=buffer.device)].cpu().numpy()
    return (copy.data for copy in copies)
