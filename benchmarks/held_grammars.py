"""How long a stream stands still while grammars come that take long to be made, ours beside another checkout's.

    python benchmarks/held_grammars.py [--rounds 3] [--also /another/checkout]

llama-100m streams to one client without a grammar; beside it come schemas of a thousand bounded integers, no two alike,
one after the other, each asked for one token. What is told is the stream's longest gap between two tokens, and how long
such a request takes; medians over the rounds.
"""

import argparse
import json
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from engines import kvasir
from random_models import make_model
from servers import WORK, OtherWork, Server, this_machine

NUM_PROPERTIES, NUM_SCHEMAS, NUM_TOKENS = 1000, 6, 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--also", type=Path, action="append", default=[], metavar="FOLDER")
    options = parser.parse_args()
    model = make_model("llama-100m", WORK / "models")
    servers = [kvasir(model, 18121 + index, folder) for index, folder in enumerate([None, *options.also])]
    print(f"{this_machine()}\n")
    print("| | longest gap alone, ms | beside the schemas, ms | a schema's first token, ms |\n|---|---|---|---|")
    other_work = OtherWork()
    for server, name in zip(servers, ["this checkout", *map(str, options.also)], strict=True):
        server.start(WORK / f"held-{server.port}.log")
        try:
            with other_work.than(server):
                rounds = [
                    (*_gaps(server, number, 0), *_gaps(server, number, NUM_SCHEMAS)) for number in range(options.rounds)
                ]
        finally:
            server.stop()
        alone, _, beside, first = (1000 * statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {alone:.0f} | {beside:.0f} | {first:.0f} |", flush=True)
    print(f"\n{other_work}")


def _gaps(server: Server, number: int, num_schemas: int) -> tuple[float, float]:
    """Seconds: the longest gap of a stream that begins before the first schema and ends after the last, and the median
    of the schemas' answers (0 without any)."""
    arrivals: list[float] = []
    is_over = threading.Event()
    reader = threading.Thread(target=_read, args=(server, arrivals, is_over))
    reader.start()
    while len(arrivals) < 20:
        time.sleep(0.01)
    begin = time.perf_counter()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        seconds = [_asked(client, _schema(number * NUM_SCHEMAS + index)) for index in range(num_schemas)]
    if not num_schemas:
        time.sleep(2)
    end = time.perf_counter()
    is_over.set()
    reader.join()
    within = [at for at in arrivals if begin - 0.1 <= at <= end]
    longest = max(after - before for before, after in pairwise(within))
    return longest, statistics.median(seconds) if seconds else 0.0


def _read(server: Server, arrivals: list[float], is_over: threading.Event) -> None:
    body = {"model": "m", "prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())
            if is_over.is_set():
                return


def _schema(number: int) -> dict[str, Any]:
    """Bounds differ, so no grammar is known yet."""
    integers = {
        f"p{index}": {"type": "integer", "minimum": index, "maximum": 10**9 + number} for index in range(NUM_PROPERTIES)
    }
    return {"type": "object", "properties": integers}


def _asked(client: httpx.Client, schema: dict[str, Any]) -> float:
    begin = time.perf_counter()
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"model": "m", "prompt": "a", "max_tokens": 1, "response_format": wanted}
    client.post("/v1/completions", content=json.dumps(body)).raise_for_status()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
