"""Which blocks of later prompts are answers of earlier ones: traces name the blocks of prompts only.

A request is taken to go on from the latest before it whose prompt's full blocks it begins with and whose answer it has
room for. That names some answers too many, where prompts have a beginning in common, and none too few.
"""

from collections import defaultdict

from benchmarks.routing.trace import Trace


def answers_of(trace: Trace) -> dict[int, tuple[int, ...]]:
    """By number of the request: the blocks that it fills behind the full ones of its prompt, where it fills any."""
    size = trace.block_tokens
    open_ends: defaultdict[int, list[int]] = defaultdict(list)  # last full block -> requests that none goes on from
    answers: dict[int, tuple[int, ...]] = {}
    for number, request in enumerate(trace.requests):
        for block in reversed(request.blocks):
            found = next((each for each in reversed(open_ends[block]) if _fits(trace, each, number)), None)
            if found is not None:
                open_ends[block].remove(found)
                before = trace.requests[found]
                end = (before.num_input_tokens + before.num_output_tokens) // size
                answers[found] = request.blocks[before.num_input_tokens // size : end]
                break
        num_full = request.num_input_tokens // size
        if num_full:
            open_ends[request.blocks[num_full - 1]].append(number)
    return {number: blocks for number, blocks in answers.items() if blocks}


def _fits(trace: Trace, earlier: int, later: int) -> bool:
    before, after = trace.requests[earlier], trace.requests[later]
    return before.num_input_tokens + before.num_output_tokens <= after.num_input_tokens
