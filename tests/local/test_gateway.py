"""`kvasir-operator local examples/gateway.yaml`: two models behind one endpoint of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import NotFoundError, OpenAI
from tests.local.conftest import LocalService

MANIFEST = Path(__file__).parents[2] / "examples" / "gateway.yaml"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    service = LocalService(MANIFEST)
    try:
        service.wait_ready()
        yield service.client()
    finally:
        service.stop()


def completion(client: OpenAI, model: str) -> tuple[str, str]:
    """The name that the engine answers by, and the text."""
    made = client.completions.create(model=model, prompt="import os\n", max_tokens=16, temperature=0)
    return made.model, made.choices[0].text


def test_it_lists_the_models_of_all_services_and_their_aliases(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"kvasir-python-7m", "kvasir-python", "kvasir-python-700k"}


def test_each_name_is_answered_by_its_own_model(client: OpenAI) -> None:
    large, alias, small = (
        completion(client, name) for name in ("kvasir-python-7m", "kvasir-python", "kvasir-python-700k")
    )
    assert (large[0], small[0]) == ("kvasir-python-7m", "kvasir-python-700k")
    assert alias[1] == large[1] != small[1]


def test_a_name_that_nobody_serves_is_refused(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="kvasir-python-70b"):
        completion(client, "kvasir-python-70b")
