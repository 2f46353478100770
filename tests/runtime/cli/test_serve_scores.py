"""Scores, rankings and classes over HTTP, of a generating model that is asked for yes or no, as Qwen3-Reranker is."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.runtime.cli.conftest import Server, byte_tokenizer, running_servers
from transformers import Qwen3Config, Qwen3ForCausalLM

TOKENIZER = byte_tokenizer("no", "yes")
NO, YES = 256, 257
QUERY, DOCUMENTS = "what is it?", ["it is this", "it is that {query}", "nothing of it"]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reranker"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path):
    with running_servers(folder) as start:
        yield start("--convert", "classify", "--dtype", "float32", "--max-num-batched-tokens", "512").wait_ready()


@pytest.fixture(scope="module")
def expected(folder: Path):
    """How much likelier yes is than no behind the prompt of each pair, as Hugging Face's model says."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def of(*documents: str, query: str = QUERY, instruction: str = INSTRUCTION) -> np.ndarray:
        prompts = [PROMPT.format(instruction=instruction, query=query, document=each) for each in documents]
        logits = torch.stack([model(torch.tensor([TOKENIZER.encode(each).ids])).logits[0, -1] for each in prompts])
        return torch.sigmoid(logits[:, YES] - logits[:, NO]).numpy()

    return of


def test_a_query_is_scored_with_each_document(server, expected) -> None:
    answer = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS).json()
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected(*DOCUMENTS), atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(
        len(PROMPT.format(instruction=INSTRUCTION, query=QUERY, document=each)) for each in DOCUMENTS
    )


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_or_each_query_with_its_own(names: tuple[str, str], server, expected) -> None:
    sides = {names[0]: ["one", "two"], names[1]: ["first", {"text": "second"}]}
    answer = ask(server, "/score", **sides).json()
    wanted = [*expected("first", query="one"), *expected("second", query="two")]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted, atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_the_best_first(path: str, server, expected) -> None:
    answer = ask(server, path, query=QUERY, documents=DOCUMENTS, top_n=2).json()
    scores = expected(*DOCUMENTS)
    order = np.argsort(-scores)[:2].tolist()
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in order]
    np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], scores[order], atol=1e-5)
    assert {"id", "model", "usage"} <= answer.keys()


def test_documents_are_left_out_or_cut_where_that_is_asked_for(server, expected) -> None:
    answer = ask(server, "/rerank", query=QUERY, documents=["0123456789"], max_tokens_per_doc=4, return_documents=False)
    (result,) = answer.json()["results"]
    assert "document" not in result
    np.testing.assert_allclose(result["relevance_score"], expected("0123")[0], atol=1e-5)


def test_a_query_is_cut_where_that_is_asked_for(server, expected) -> None:
    answer = ask(server, "/rerank", query="0123456789", documents=["x"], max_tokens_per_query=3).json()
    np.testing.assert_allclose(answer["results"][0]["relevance_score"], expected("x", query="012")[0], atol=1e-5)


def test_of_a_prompt_that_is_too_long_the_document_is_cut(server, expected) -> None:
    """Not the words behind it, without which the model is not asked."""
    room = 512 - len(PROMPT.format(instruction=INSTRUCTION, query=QUERY, document=""))
    answer = ask(server, "/v1/score", text_1=QUERY, text_2="x" * 600, truncate_prompt_tokens=-1).json()
    np.testing.assert_allclose(answer["data"][0]["score"], expected("x" * room)[0], atol=1e-5)


def test_another_instruction_gives_another_score(server, expected) -> None:
    answer = ask(server, "/rerank", query=QUERY, documents=DOCUMENTS[:1], instruction="Find the contrary").json()
    wanted = expected(DOCUMENTS[0], instruction="Find the contrary")
    np.testing.assert_allclose(answer["results"][0]["relevance_score"], wanted[0], atol=1e-5)


def test_scores_may_be_had_as_logits(server, expected) -> None:
    answer = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False).json()
    wanted = expected(*DOCUMENTS)
    np.testing.assert_allclose([each["score"] for each in answer["data"]], np.log(wanted / (1 - wanted)), atol=1e-4)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_a_prompt_of_the_clients_own_is_classified(path: str, server, expected) -> None:
    prompt = PROMPT.format(instruction=INSTRUCTION, query=QUERY, document=DOCUMENTS[0])
    (entry,) = ask(server, path, input=prompt).json()["data"]
    assert (entry["label"], entry["num_classes"]) == ("LABEL_0", 1)
    np.testing.assert_allclose(entry["probs"], expected(DOCUMENTS[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/score", {"text_1": "x"}, "nothing was given, but one of text_2, documents", "text_2"),
        ("/score", {"text_1": "x", "queries": "y", "text_2": "z"}, "text_1 and queries was given", "text_1"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["z"] * 3}, "text_1 has 2 texts and text_2 3", "text_1"),
        ("/score", {"text_1": "x", "text_2": ["z"] * 2049}, "2049 texts were given", "text_2"),
        ("/rerank", {"query": "x"}, "documents is required", "documents"),
        ("/rerank", {"query": "x", "documents": []}, "documents", "documents"),
        ("/rerank", {"query": "x", "documents": ["y" * 600]}, "the model reads at most 512", "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n", "top_n"),
        ("/rerank", {"query": "x", "documents": [{"title": "y"}]}, "unknown field 'title' in documents[0];",
         "documents[0].title"),
        ("/v1/embeddings", {"input": "x"}, "it makes no embeddings; ask /v1/score", None),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(path: str, body: Any, message: str, param: str | None, server) -> None:
    answer = ask(server, path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def ask(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)
