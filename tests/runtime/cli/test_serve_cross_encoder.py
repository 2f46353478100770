"""A cross-encoder over HTTP: query and document are joined by its tokenizer, and told apart by their types."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.runtime.cli.conftest import Server, running_servers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz?."
QUERY, DOCUMENTS = "what is it?", ["It is this.", "no", "nothing of it"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "cross"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    reference_tokenizer().save_pretrained(folder)
    return folder


def reference_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS])}
    vocab |= {f"##{letter}": len(vocab) + index for index, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


@pytest.fixture(scope="module")
def server(folder: Path):
    with running_servers(folder) as start:
        yield start("--dtype", "float32", "--max-num-batched-tokens", "64", "--max-num-seqs", "16").wait_ready()


@pytest.fixture(scope="module")
def expected(folder: Path):
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = reference_tokenizer()

    @torch.inference_mode()
    def of(*texts: tuple[str, ...], **options: Any) -> np.ndarray:
        inputs = [tokenizer(*each, return_tensors="pt", return_token_type_ids=True, **options) for each in texts]
        return torch.sigmoid(torch.cat([model(**each).logits[:, 0] for each in inputs])).numpy()

    return of


def test_documents_are_ranked(server, expected) -> None:
    answer = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    scores = expected(*((QUERY, document) for document in DOCUMENTS))
    order = np.argsort(-scores).tolist()
    assert [each["index"] for each in answer["results"]] == order
    np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], scores[order], atol=1e-5)


def test_texts_come_whole_and_anew_however_many_and_often(server, expected) -> None:
    """A step has room for three of them and a part of the next, and all have been computed before."""
    documents = [f"it is {letter}" * 3 for letter in LETTERS[:12]]
    scores = [ask(server, "/v1/score", text_1=QUERY, text_2=documents)["data"] for _ in range(2)]
    assert scores[0] == scores[1]
    wanted = expected(*((QUERY, document) for document in documents))
    np.testing.assert_allclose([each["score"] for each in scores[0]], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("query", "document"), [("ab " * 12, "cd " * 20), ("ab " * 20, "cd " * 20), ("ab", "cd " * 99)]
)
@pytest.mark.parametrize("most", [20, 21])
def test_a_pair_that_is_too_long_is_cut_as_transformers_cuts_it(
    query: str, document: str, most: int, server, expected
) -> None:
    answer = ask(server, "/v1/score", text_1=query, text_2=document, truncate_prompt_tokens=most)
    wanted = expected((query, document), truncation="longest_first", max_length=most)
    np.testing.assert_allclose(answer["data"][0]["score"], wanted[0], atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == most


def test_a_single_text_is_classified(server, expected) -> None:
    (entry,) = ask(server, "/classify", input="nothing")["data"]
    np.testing.assert_allclose(entry["probs"], expected(("nothing",)), atol=1e-5)


def test_a_pair_that_is_too_long_is_refused(server) -> None:
    body = {"query": "x", "documents": ["fine", "y " * 62]}
    answer = httpx.post(f"{server.url}/rerank", json=body, timeout=60)
    assert answer.status_code == 400
    assert "it has 66 tokens, but the model reads at most 64" in answer.json()["error"]["message"]


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()
