"""The example with a draft model: Hugging Face's answers, though drafts were made and held."""

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.local.chats import CHATS, ask
from tests.local.conftest import ROOT, LocalService


@pytest.fixture(scope="module")
def speculative() -> Iterator[LocalService]:
    service = LocalService(ROOT / "examples" / "speculative.yaml")
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


def num_accepted_tokens(service: LocalService) -> float:
    [engine] = {line.split(" at ")[1].strip() for line in service.lines if "serve-0 starting at" in line}
    families = text_string_to_metric_families(httpx.get(f"{engine}/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return sum(one.value for one in samples if one.name == "kvasir_spec_decode_num_accepted_tokens_total")


def test_drafts_hold_and_the_answers_are_those_of_the_model_alone(
    speculative: LocalService, expected: dict[str, str]
) -> None:
    client = speculative.client()
    assert {chat: ask("speculative", client, chat) for chat in CHATS} == expected
    assert num_accepted_tokens(speculative) > 0
