"""Embeddings over HTTP, as OpenAI's client asks for them, of a checkpoint with sentence-transformers' files."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tests.runtime.cli.conftest import Server, byte_tokenizer, running_servers, save_tiny_llama
from transformers import AutoModel

TEXTS = ["hello", "a longer text, of which there are several blocks: " * 3, "größer"]
TOKENIZER = byte_tokenizer()
QUERY_PROMPT = "Instruct: find it\nQuery:"


LONG = "x" * 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last token makes the vector, which may be cut to 8 or 16 of 32 numbers."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("models") / "embedder", max_position_embeddings=256)
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"matryoshka_dimensions": [8, 16]})
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling",
             "sentence_transformers.sentence_transformer.modules.normalize.Normalize"]  # fmt: skip
    paths = ["", "1_Pooling", "2_Normalize"]
    write(folder / "modules.json", [{"path": path, "type": kind} for path, kind in zip(paths, kinds, strict=True)])
    (folder / "1_Pooling").mkdir()
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    prompts = {"query": QUERY_PROMPT, "document": ""}
    write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    return folder


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def server(folder: Path):
    with running_servers(folder) as start:
        yield start("--dtype", "float32", "--max-num-batched-tokens", "64", "--max-num-seqs", "8").wait_ready()


@pytest.fixture(scope="module")
def client(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path):
    """The vectors that Hugging Face's model gives, of length 1."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def of(*texts: str, size: int = 32) -> np.ndarray:
        ids = [TOKENIZER.encode(text).ids for text in texts]
        vectors = torch.stack([model(torch.tensor([each])).last_hidden_state[0, -1][:size] for each in ids])
        return torch.nn.functional.normalize(vectors, dim=1).numpy()

    return of


def test_openais_client_gets_vectors_which_it_asks_for_as_base64(client, expected) -> None:
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    np.testing.assert_allclose([entry.embedding for entry in answer.data], expected(*TEXTS), atol=1e-5)
    num_tokens = sum(len(text.encode()) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "embedder", "embedding")


def test_numbers_and_base64_say_the_same(server) -> None:
    numbers, packed = (ask(server, input="hello", encoding_format=each).json() for each in ("float", "base64"))
    unpacked = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(np.array(numbers["data"][0]["embedding"], dtype=np.float32), unpacked)


@pytest.mark.parametrize("kind", ["text", "ids", "lists of ids"])
def test_an_input_is_a_text_or_token_ids(kind: str, client, expected) -> None:
    ids = TOKENIZER.encode("hello").ids
    inputs: Any = {"text": "hello", "ids": ids, "lists of ids": [ids, ids[:2]]}[kind]
    answer = client.embeddings.create(model="embedder", input=inputs, encoding_format="float")
    wanted = expected("hello", "he") if kind == "lists of ids" else expected("hello")
    np.testing.assert_allclose([entry.embedding for entry in answer.data], wanted, atol=1e-5)


def test_shorter_vectors_are_cut_and_then_of_length_1(client, expected) -> None:
    answer = client.embeddings.create(model="embedder", input="hello", dimensions=8)
    np.testing.assert_allclose(answer.data[0].embedding, expected("hello", size=8)[0], atol=1e-5)


def test_a_prompt_of_the_models_own_stands_before_a_text(server, expected) -> None:
    answer = ask(server, input="hello", prompt_name="query").json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected(QUERY_PROMPT + "hello")[0], atol=1e-5)


@pytest.mark.parametrize(("side", "left"), [("right", 4), ("left", -4)])
def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for(side: str, left: int, server, expected) -> None:
    text = "0123456789"
    kept = text[:left] if left > 0 else text[left:]
    answer = ask(server, input=text, truncate_prompt_tokens=4, truncation_side=side).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected(kept)[0], atol=1e-5)
    whole = ask(server, input="x" * 500, truncate_prompt_tokens=-1).json()
    assert whole["usage"]["prompt_tokens"] == 256


def test_vectors_may_be_had_as_the_model_makes_them(server) -> None:
    raw = np.array(ask(server, input="hello", use_activation=False).json()["data"][0]["embedding"])
    unit = np.array(ask(server, input="hello").json()["data"][0]["embedding"])
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-6)


def test_pooling_gives_the_same_vector(server) -> None:
    pooled = httpx.post(f"{server.url}/pooling", json={"input": "hello"}, timeout=60).json()
    assert pooled["data"][0]["data"] == ask(server, input="hello").json()["data"][0]["embedding"]


def test_scores_of_a_model_that_embeds_are_cosines(server, expected) -> None:
    """With the prompts that the model has for queries and documents."""
    answer = httpx.post(f"{server.url}/v1/score", json={"text_1": "hello", "text_2": ["hello", "other"]}, timeout=60)
    query, *documents = expected(QUERY_PROMPT + "hello", "hello", "other")
    scores = [each["score"] for each in answer.json()["data"]]
    np.testing.assert_allclose(scores, np.stack(documents) @ query, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": LONG, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/score", {"text_1": [LONG], "text_2": ["b"]}, "text_1"),
        ("/score", {"queries": "a", "items": ["b", LONG]}, "items"),
    ],
)
def test_the_side_that_cannot_be_read_is_named(path: str, body: dict[str, Any], param: str, server) -> None:
    error = httpx.post(f"{server.url}{path}", json=body).json()["error"]
    assert (error["param"], error["message"].partition(":")[0]) == (param, param)


def test_a_model_that_embeds_knows_no_classes(server) -> None:
    answer = httpx.post(f"{server.url}/classify", json={"input": "x"}, timeout=60)
    assert answer.status_code == 400
    assert "it knows no classes; ask /v1/embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "input: nothing was given", "input"),
        ({"input": []}, "not empty", "input"),
        ({"input": ""}, "input: it is empty", "input"),
        ({"input": ["fine", ""]}, "input[1]: it is empty", "input[1]"),
        ({"input": ["fine", "x" * 257]}, "input[1]: it has 257 characters", "input[1]"),
        ({"input": ["fine", 3]}, "input[1]: 3 was given", "input[1]"),
        ({"input": [1, "x"]}, "was given, but input should be", "input"),
        ({"input": [[1], [256]]}, "token id 256 is not in the vocabulary", "input[1]"),
        ({"input": "x" * 257}, "it has 257 characters, which is at least 257 tokens", "input"),
        ({"input": [0] * 257}, "it has 257 tokens, but the model reads at most 256", "input"),
        ({"input": ["x"] * 2049}, "2049 texts were given", "input"),
        ({"input": "x", "dimensions": 9}, "this model's vectors have 8, 16", "dimensions"),
        ({"input": "x", "dimensions": 64}, "64 was given", "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ({"input": "x", "prompt_name": "none"}, "known: 'document', 'query'", "prompt_name"),
        ({"input": "x", "truncate_prompt_tokens": 300}, "reads at most 256", "truncate_prompt_tokens"),
        ({"input": "x", "temperature": 1}, "unknown field 'temperature'", "temperature"),
        ({"input": "x", "model": "gpt-4"}, "is not served here", "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], message: str, param: str, server) -> None:
    answer = ask(server, **body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_model_that_makes_vectors_generates_nothing(path: str, server) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = httpx.post(server.url + path, json=prompt, timeout=60)
    assert answer.status_code == 400
    assert "start the server with --runner generate" in answer.json()["error"]["message"]


def test_a_model_that_generates_makes_no_vectors(plain_server) -> None:
    answer = ask(plain_server, input="x")
    assert answer.status_code == 400
    assert "start it with --runner pooling" in answer.json()["error"]["message"]


def test_what_was_asked_is_counted(server) -> None:
    before = counted(server)
    assert ask(server, input=["one", "other"]).is_success
    after = counted(server)
    assert [after[name] - before[name] for name in after] == [1, 2, 8]


def counted(server: Server) -> dict[str, float]:
    """Answers, vectors, and tokens of prompts."""
    names = ('http_requests_total{handler="/v1/embeddings",method="POST",status="2xx"}',
             'kvasir_requests_finished_total{finish_reason="stop",model_name="embedder"}',
             'kvasir_prompt_tokens_total{model_name="embedder"}')  # fmt: skip
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line[0] != "#")
    return {name: float(lines[name]) for name in names}


def ask(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
