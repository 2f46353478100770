import pytest

from kvasir_router.errors import UnknownModelError
from kvasir_router.service.registry import ModelCatalog


def catalog(own: str | None = "tiny", *aliases: str, listed: frozenset[str] = frozenset()) -> ModelCatalog:
    return ModelCatalog(own, aliases, (), lambda: listed, created=7)


def test_the_own_model_and_its_aliases_are_listed_without_any_engine() -> None:
    cards = catalog("tiny", "b", "a").cards()
    assert [(card["id"], card["root"]) for card in cards] == [("tiny", "tiny"), ("b", "tiny"), ("a", "tiny")]
    assert cards[0] == {"id": "tiny", "object": "model", "created": 7, "owned_by": "kvasir", "root": "tiny"}


def test_adapters_that_engines_list_follow() -> None:
    names = catalog("tiny", "alias", listed=frozenset({"tiny", "sql", "alias", "chat"})).names()
    assert names == ("tiny", "alias", "chat", "sql")


def test_without_a_name_the_engines_tell() -> None:
    assert catalog(None, listed=frozenset({"b", "a"})).names() == ("a", "b")


def test_only_aliases_stand_for_another_name() -> None:
    models = catalog("tiny", "alias", listed=frozenset({"sql"}))
    assert [models.resolve(name) for name in ("alias", "tiny", "sql", "nope")] == ["tiny", "tiny", "sql", "nope"]


@pytest.mark.parametrize("name", ["tiny", "alias", "sql", None])
def test_every_name_that_is_listed_may_be_asked_for(name: str | None) -> None:
    catalog("tiny", "alias", listed=frozenset({"sql"})).check(name)


def test_any_other_is_unknown() -> None:
    with pytest.raises(UnknownModelError, match="'nope' is not served here; served are: tiny, alias"):
        catalog("tiny", "alias").check("nope")


def test_while_nothing_is_known_nothing_is_refused() -> None:
    catalog(None).check("whatever")
