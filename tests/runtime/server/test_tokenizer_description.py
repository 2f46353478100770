"""GET /tokenizer: enough to make the engine's own token ids elsewhere, for the router alone."""

import json
from pathlib import Path

import httpx
import jinja2
import pytest
import tokenizers
from tests.runtime.server.test_trust import ask

from kvasir_runtime.config import ServerConfig
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.tokenizer_description import TokenizerDescription

TEXTS = ["the quick 日本語 😀", "<|im_start|>user\nhi<|im_end|>\n", ""]
SECRET = {"x-kvasir-router-secret": "s3cret"}


def describe(folder: Path, **settings: object) -> TokenizerDescription:
    return TokenizerDescription(
        Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), settings), "t"
    )


def test_its_tokenizer_and_template_make_the_engines_token_ids(running) -> None:
    description = running.http.get("/tokenizer").json()
    own = tokenizers.Tokenizer.from_str(description["tokenizer"])
    for text in TEXTS:
        assert own.encode(text).ids == running.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    messages = [{"role": "user", "content": "hi"}]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(description["chat_template"])
    rendered = template.render(messages=messages, add_generation_prompt=True, **description["special_tokens"])
    expected = running.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert own.encode(rendered, add_special_tokens=False).ids == expected


def test_what_tokenizer_config_overrules_is_in_it(model_folder: Path) -> None:
    begins, does_not = (
        describe(model_folder, bos_token="<|im_start|>", add_bos_token=adds_bos).response for adds_bos in (True, False)
    )
    ids = [tokenizers.Tokenizer.from_str(each.tokenizer).encode("a").ids for each in (begins, does_not)]
    assert len(ids[0]) == len(ids[1]) + 1
    assert begins.special_tokens == {"bos_token": "<|im_start|>"}


def test_a_model_without_a_template_has_none(model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    assert TokenizerDescription(tokenizer, None).response.chat_template is None


def test_its_digest_names_its_content(model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    digest = TokenizerDescription(tokenizer, "t").response.digest
    assert TokenizerDescription(Tokenizer.load(model_folder), "t").response.digest == digest
    others = [
        TokenizerDescription(tokenizer, "u"),
        TokenizerDescription(tokenizer, None),
        describe(model_folder, bos_token="<|im_start|>"),
        describe(model_folder, bos_token="<|im_start|>", add_bos_token=True),
    ]
    assert len({digest, *(other.response.digest for other in others)}) == 5


def test_who_has_it_already_is_told_so_without_a_body(running) -> None:
    whole = running.http.get("/tokenizer")
    assert whole.headers["etag"] == f'"{whole.json()["digest"]}"'
    for header in (whole.headers["etag"], f'"other", {whole.headers["etag"]}'):
        again = running.http.get("/tokenizer", headers={"If-None-Match": header})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", whole.headers["etag"])
    assert running.http.get("/tokenizer", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("secret", "peer", "headers", "status"),
    [
        (None, "127.0.0.1", {}, 200),
        (None, "10.0.0.7", {}, 403),
        ("s3cret", "10.0.0.7", SECRET, 200),
        ("s3cret", "10.0.0.7", {}, 403),
        ("s3cret", "127.0.0.1", {}, 403),
    ],
)
def test_only_the_router_gets_it(secret, peer: str, headers, status: int) -> None:
    answer = ask(secret, peer, headers, "/tokenizer")
    assert answer.status_code == status
    if status == 403:
        assert "only the router may ask for the tokenizer" in answer.json()["error"]["message"]


def test_the_router_needs_no_api_key_for_it(start_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_ROUTER_SECRET", "s3cret")
    with start_server(config=ServerConfig(api_key="key")) as running:
        answers: list[httpx.Response] = [
            running.http.get("/tokenizer", headers=headers) for headers in (SECRET, {"Authorization": "Bearer key"})
        ]
    assert [answer.status_code for answer in answers] == [200, 403]
    assert json.loads(answers[1].text)["error"]["code"] == "not_the_router"


def test_its_settings_are_shown_to_clients_where_a_flag_asks_for_it(running, start_server, model_folder: Path) -> None:
    """As lm-eval reads them."""
    assert running.http.get("/tokenizer_info").status_code == 404
    with start_server(config=ServerConfig(enable_tokenizer_info_endpoint=True)) as showing:
        info = showing.http.get("/tokenizer_info").json()
    settings = json.loads((model_folder / "tokenizer_config.json").read_text())
    assert info.items() >= {"tokenizer_class": "PreTrainedTokenizerFast", **settings}.items()


def test_a_token_that_is_written_with_properties_is_shown_as_its_text(model_folder: Path) -> None:
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
    info = describe(model_folder, bos_token=token, model_max_length=5, tokenizer_class="LlamaTokenizer").info()
    assert (info["bos_token"], info["model_max_length"], info["tokenizer_class"]) == ("<s>", 5, "LlamaTokenizer")
