"""What a request becomes on arrival, and the gathering of its prompt's scores over chunks."""

import pytest

from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.request import Request, request_from, sequences_of


def spec(num_prompt_tokens: int, **sampling: int) -> RequestSpec:
    return RequestSpec(prompt_token_ids=list(range(num_prompt_tokens)), sampling=SamplingParams(seed=0, **sampling))


def message(*, num_prompt_tokens: int = 5, max_tokens: int = 8, so_far: tuple[list[int], ...] = ([],)) -> AddRequest:
    starts = [SequenceStart(index=i, seed=10 + i, output_token_ids=tokens) for i, tokens in enumerate(so_far)]
    return AddRequest(
        request_id="a", api_index=2, spec=spec(num_prompt_tokens, max_tokens=max_tokens), sequences=starts,
        arrival_time=3.0,
    )  # fmt: skip


def scored(num_prompt_tokens: int = 5) -> Request:
    return Request("", 0, spec(num_prompt_tokens, max_tokens=1, prompt_logprobs=0), num_prompt_tokens, 9, 0.0)


def scores(first: int, last: int) -> list[TokenLogprobs]:
    """Of prompt tokens `first` to `last`."""
    return [TokenLogprobs([token], [0.0], 1) for token in range(first, last + 1)]


@pytest.mark.parametrize(("max_model_len", "max_total"), [(12, 12), (13, 13), (14, 13)])
def test_prompt_and_output_are_bounded_by_max_tokens_and_the_context(max_model_len, max_total):
    assert request_from(message(), max_model_len=max_model_len).max_total_tokens == max_total


def test_a_request_keeps_what_it_was_sent_with():
    sent = message()
    request = request_from(sent, max_model_len=64)
    assert (request.request_id, request.api_index, request.arrival_time) == ("a", 2, 3.0)
    assert request.spec is sent.spec


def test_cached_tokens_of_a_request_begun_elsewhere_were_counted_there():
    assert request_from(message(), max_model_len=64).num_cached_tokens is None
    assert request_from(message(so_far=([], [7])), max_model_len=64).num_cached_tokens == 0


def test_each_start_becomes_a_sequence_with_its_own_seed_and_tokens():
    sent = message(so_far=([], [7, 8]))
    tables = [SequenceBlocks(4, ([],), [0]) for _ in range(2)]
    fresh, continued = sequences_of(request_from(sent, max_model_len=64), sent, tables)
    assert (fresh.index, fresh.sampling.seed, fresh.token_ids) == (0, 10, [0, 1, 2, 3, 4])
    assert (continued.index, continued.sampling.seed, continued.token_ids) == (1, 11, [0, 1, 2, 3, 4, 7, 8])
    assert (fresh.has_sent_output, continued.has_sent_output) == (False, True)
    assert fresh.num_fork_tokens == 4, "the prompt's last token is computed by each for itself"


def test_sequences_of_one_prompt_have_its_tokens_once():
    sent = message(so_far=([], [], [7]))
    tables = [SequenceBlocks(4, ([],), [0]) for _ in range(3)]
    first, second, _ = sequences_of(request_from(sent, max_model_len=64), sent, tables)
    assert first.token_ids is second.token_ids


def test_scores_are_gathered_over_chunks():
    request = scored()
    request.gather_scores(0, scores(1, 2))
    assert request.lacks_prompt_logprobs
    request.gather_scores(2, scores(3, 4))
    assert not request.lacks_prompt_logprobs
    assert request.all_scores == [None, *scores(1, 4)]


def test_scores_that_come_again_count_once():
    request = scored()
    request.gather_scores(0, scores(1, 3))
    request.gather_scores(0, scores(1, 2))
    request.gather_scores(2, scores(3, 4))
    assert request.prompt_logprobs == scores(1, 4)


def test_scores_behind_a_gap_are_not_taken_for_those_in_it():
    request = scored()
    request.gather_scores(2, scores(3, 4))
    assert request.prompt_logprobs == []


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert not scored(1).lacks_prompt_logprobs
    assert scored(1).all_scores == [None]


def test_scores_are_neither_lacking_nor_told_where_nobody_asked():
    request = request_from(message(), max_model_len=64)
    assert (request.lacks_prompt_logprobs, request.all_scores) == (False, None)
