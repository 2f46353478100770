"""What one stage sends the next one gets, in order, over gloo as within a process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.runtime.exactness.rank_threads import meet_all
from tests.runtime.parallel.queue_link import queue_links

from kvasir_runtime.errors import CollectiveFailedError
from kvasir_runtime.parallel.stage_link import MOST_UNFINISHED, StageLink
from kvasir_runtime.parallel.topology import Topology

NUM_STAGES = 3
NUM_MESSAGES = MOST_UNFINISHED
MakeLinks = Callable[[], Sequence[StageLink]]


def links_of(num_stages: int, folder: Path) -> list[StageLink]:
    links = [groups.link for groups in meet_all(Topology(pipeline_size=num_stages), folder)]
    assert None not in links
    return [link for link in links if link is not None]


@pytest.fixture(params=["queues", "gloo"])
def make_links(request: pytest.FixtureRequest, tmp_path: Path) -> MakeLinks:
    def over_gloo() -> list[StageLink]:
        return links_of(NUM_STAGES, tmp_path)

    return over_gloo if request.param == "gloo" else lambda: queue_links(NUM_STAGES)


def test_messages_arrive_in_order_and_nobody_waits_to_send(make_links: MakeLinks) -> None:
    links = make_links()
    for number in range(NUM_MESSAGES):
        links[0].send(torch.full((2, 3), float(number)))
    got = [torch.zeros(2, 3) for _ in range(NUM_MESSAGES)]
    for message in got:
        links[1].receive(message)
        links[1].send(message + 10)
    last = torch.zeros(2, 3)
    links[2].receive(last)
    assert [message[0, 0].item() for message in got] == list(range(NUM_MESSAGES))
    assert last.tolist() == [[10.0] * 3] * 2
    assert [link.counts.calls for link in links] == [
        [0, 0, 0, sent, got] for sent, got in ((NUM_MESSAGES, 0), (NUM_MESSAGES, NUM_MESSAGES), (0, 1))
    ]
    assert links[0].counts.num_bytes[3] == NUM_MESSAGES * 2 * 3 * 4


def test_stages_tell_each_other_words_of_any_length(make_links: MakeLinks) -> None:
    links, words = make_links(), [b"short", b"a longer one", b"c"]
    with ThreadPoolExecutor(NUM_STAGES) as threads:
        told = list(
            threads.map(lambda link, word: (list(link.exchange(word)), list(link.exchange(word * 2))), links, words)
        )
    assert told == [(words, [word * 2 for word in words])] * NUM_STAGES


def test_a_stage_that_has_gone_is_an_error(tmp_path: Path) -> None:
    links = links_of(2, tmp_path)
    del links[0]
    with pytest.raises(CollectiveFailedError, match="pipeline stage 1 is out of reach"):
        links[0].receive(torch.zeros(1))
