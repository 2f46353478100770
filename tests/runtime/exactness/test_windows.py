"""Layers with a sliding window keep the blocks of their window only, in the real engine."""

from typing import Any

import pytest
from tests.runtime.exactness.conftest import BLOCK_SIZE, WINDOW

WINDOW_BLOCKS = (WINDOW - 1 + BLOCK_SIZE - 1) // BLOCK_SIZE + 1
"""At most so many blocks hold a key that the next token sees, or the token itself."""


@pytest.mark.parametrize(("architecture", "full_groups", "window_groups"), [("Mistral", 0, 1), ("Gemma3", 1, 2)])
def test_at_four_times_the_window_only_its_blocks_are_held(
    architecture: str, full_groups: int, window_groups: int, reference: Any, start_engine: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    engine = start_engine(expected.folder)
    prompt, output = expected.prompts[4], expected.outputs[4]
    engine.add("long", prompt)
    num_known = 0
    while num_known < 4 * WINDOW:
        engine.core.step()
        num_known = len(prompt) + sum(len(o.new_token_ids) for o in engine.channel.outputs.get("long", []))
    all_blocks = -(-num_known // BLOCK_SIZE)
    assert engine.channel.outputs["long"][-1].finish_reason is None
    used = engine.num_blocks_used
    assert used <= full_groups * all_blocks + window_groups * WINDOW_BLOCKS
    assert used < (full_groups + window_groups) * all_blocks
    assert engine.finish("long").token_ids("long") == output
