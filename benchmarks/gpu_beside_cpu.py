"""Whether a GPU answers as a CPU does: the same requests to `kvasir-runtime serve` on both, in float32.

    PYTHONPATH=runtime:router python benchmarks/gpu_beside_cpu.py [--device cuda]

Texts and calls must be equal, token for token: greedy and seeded draws, penalties, bias, beams, grammars, drafts and
tools. Log-probabilities and vectors (a decoder's, BERT's, ModernBERT's) may differ by MOST_APART. It prints a line for
each, and ends with 1 where any differ.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from servers import Server, end_on_sigterm

MODELS = Path(__file__).parents[1] / "examples" / "models"
PYTHON, CALLER = MODELS / "kvasir-python-7m", MODELS / "kvasir-caller"
FIRST_PORT, NUM_PAIRS = 22000, 7
MOST_APART = 1e-4
ENCODER = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 130, "pad_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
ENCODERS = {
    "Bert": {},
    "ModernBert": {
        "local_attention": 16, "cls_token_id": 0, "sep_token_id": 2, "bos_token_id": None, "eos_token_id": None,
    },
}  # fmt: skip

Answer = dict[str, Any]
CODE = {"prompt": "def area(width, height):\n", "max_tokens": 60, "temperature": 0}
DRAWN = {"temperature": 0.8, "seed": 3}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PHRASE = {"structured_outputs": {"regex": "[a-z]{3,9} [0-9]+"}}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
TEXTS = {"input": ["a text", "another text of some more words, " * 3, "x"]}


@dataclass(frozen=True)
class Call:
    name: str
    path: str
    body: dict[str, Any]
    read: Callable[[Answer], Any]
    """What is compared; of numbers a list."""


def texts(answer: Answer) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def first_logprobs(answer: Answer) -> list[float]:
    return [value or 0.0 for value in answer["choices"][0]["logprobs"]["token_logprobs"]]


def tool_calls(answer: Answer) -> list[str]:
    return [json.dumps(call["function"]) for call in answer["choices"][0]["message"]["tool_calls"]]


def numbers(answer: Answer) -> list[float]:
    return [number for each in answer["data"] for number in each["embedding"]]


def code(name: str, **body: Any) -> Call:
    return Call(name, "/v1/completions", CODE | body, first_logprobs if "logprobs" in body else texts)


def question(name: str, text: str, **body: Any) -> Call:
    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "temperature": 0, "max_tokens": 80} | body
    return Call(name, "/v1/chat/completions", body, tool_calls)


PLAIN = [
    code("greedy"),
    code("seeded", **DRAWN, n=3, top_p=0.9),
    code("penalised", **DRAWN, presence_penalty=0.5, frequency_penalty=0.3),
    code("biased, min_tokens", **DRAWN, logit_bias={"10": 5.0}, min_tokens=20),
    code("beams", use_beam_search=True, n=3, max_tokens=20),
    code("schema", structured_outputs={"json": OBJECT}),
    code("regular expression, seeded", **DRAWN, **PHRASE, n=2),
    code("log-probabilities", logprobs=3, echo=True, max_tokens=5),
]
DRAFTED = [code("greedy"), code("seeded", **DRAWN), code("regular expression", **PHRASE)]
CALLED = [question("a tool", "What is the weather in Paris?"), question("required", "Hello", tool_choice="required")]
VECTORS = [Call("vectors", "/v1/embeddings", TEXTS, numbers)]


def drafts(method: str, **fields: Any) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3} | fields))


def pairs() -> Iterator[tuple[str, Path, Sequence[str], Sequence[Call]]]:
    yield "plain", PYTHON, (), PLAIN
    yield "n-gram", PYTHON, drafts("ngram"), DRAFTED
    yield "EAGLE", PYTHON, drafts("eagle", model=f"{PYTHON}-eagle"), DRAFTED
    yield "tools", CALLER, (), CALLED
    yield "decoder", PYTHON, ("--runner", "pooling"), VECTORS
    for family, options in ENCODERS.items():
        yield family, make_encoder(family, options), (), VECTORS


def make_encoder(family: str, options: dict[str, Any]) -> Path:
    """A random one, whose tokens are bytes."""
    folder = Path(tempfile.mkdtemp(prefix="encoder-"))
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**ENCODER, **options)
    getattr(transformers, f"{family}Model")(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "<pad>", "</s>", *alphabet]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def serve(model: Path, device: str, port: int, flags: Sequence[str]) -> Server:
    command = [
        sys.executable,
        "-m",
        "kvasir_runtime",
        "serve",
        str(model),
        "--served-model-name",
        "m",
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--device", device, "--dtype", "float32", *flags]
    if device != "cpu":
        command += ["--num-gpu-blocks-override", "512"]  # there is one device for all
    return Server(f"{model.name} on {device}", command, port, ready_path="/ready")


def ask(server: Server, call: Call) -> Any:
    body = json.dumps({"model": "m"} | call.body).encode()
    request = urllib.request.Request(server.url + call.path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return call.read(json.load(answer))


def compare(name: str, model: Path, port: int, device: str, flags: Sequence[str], calls: Sequence[Call]) -> bool:
    servers = [serve(model, each, port + index, flags) for index, each in enumerate((device, "cpu"))]
    are_equal = True
    with tempfile.TemporaryDirectory() as logs:
        try:
            for index, server in enumerate(servers):
                server.start(Path(logs, str(index)))
            for call in calls:
                found, expected = (ask(server, call) for server in servers)
                outcome, is_equal = difference(found, expected)
                print(f"{name}, {call.name}: {outcome}", flush=True)
                are_equal &= is_equal
        finally:
            for server in servers:
                server.stop()
    return are_equal


def difference(found: Any, expected: Any) -> tuple[str, bool]:
    if isinstance(found[0], float):
        most = max(abs(own - other) for own, other in zip(found, expected, strict=True))
        return f"{most:.1e} apart at most", most <= MOST_APART
    return ("equal", True) if found == expected else (f"{found!r:.150} instead of {expected!r:.150}", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=NUM_PAIRS, help="pairs of servers, default: %(default)s")
    options = parser.parse_args()
    end_on_sigterm()
    with ThreadPoolExecutor(options.at_once) as threads:
        running = [
            threads.submit(compare, name, model, FIRST_PORT + 2 * number, options.device, flags, calls)
            for number, (name, model, flags, calls) in enumerate(pairs())
        ]
        are_equal = [pair.result() for pair in running]
    sys.exit(not all(are_equal))


if __name__ == "__main__":
    main()
