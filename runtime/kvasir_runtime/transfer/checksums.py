"""A checksum a page, so that what arrives is what was written: XXH3 with 64 bit.

It tells damage and pages that were reused too early; it is no defence against somebody who wants to deceive.
"""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor


def page_checksums(buffer: Tensor, block_ids: Sequence[int]) -> list[int]:
    """Of pages of a buffer uint8 [num_blocks, page_bytes]; those of a GPU are copied to the host first."""
    if buffer.device.type == "cpu":
        pages = buffer.numpy()
        return [xxhash.xxh3_64_intdigest(pages[block_id]) for block_id in block_ids]
    copies = buffer[torch.tensor(block_ids, device=buffer.device)].cpu().numpy()
    return [xxhash.xxh3_64_intdigest(page) for page in copies]
