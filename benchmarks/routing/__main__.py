"""How routing rules place the requests of a trace, in virtual time.

    python -m benchmarks.routing --trace FILE --speed 0.5 1 2 3 --replicas 8 64 --routers 1 2 4

FILE is in Mooncake's format, or the name of a synthetic trace (agents, chats, documents, hot-document, hot-documents,
slow-decoder), or azure:FILE for Azure's CSV of 2023, whose requests share nothing. Prints a table: share of prompt
tokens found cached; seconds to the first token; between two tokens; seconds to the last token; and of the busiest
engine over the mean, the prefill work and the requests.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.routing.engine import EngineModel
from benchmarks.routing.lineup import LINEUP
from benchmarks.routing.simulation import Outcome, Setting, simulate
from benchmarks.routing.synthetic import SYNTHETIC, azure
from benchmarks.routing.trace import Trace, load_mooncake

_HEAD = (
    "| speed | replicas | routers | rule | hit rate | TTFT mean, s | p50 | p90 | p99 | TPOT mean, ms | p99 "
    "| end to end mean, s | p99 | prefill max/mean | requests max/mean |"
)


def main() -> None:
    arguments = _parser().parse_args()
    trace = load(arguments.trace, arguments.seed)
    if arguments.first is not None:
        trace = replace(trace, requests=trace.requests[: arguments.first])
    if arguments.decode_slowdowns is not None:
        trace = replace(trace, decode_slowdowns=tuple(arguments.decode_slowdowns))
    print(
        f"{trace.name}: {len(trace.requests)} requests, {trace.hit_ceiling():.3f} of prompt tokens at most are hits\n"
    )
    print(_HEAD + "\n" + "|---" * _HEAD.count(" | ") + "|---|", flush=True)
    begin = time.perf_counter()
    for setting in _settings(arguments):
        for name in arguments.rules:
            print(_row(setting, name, simulate(trace, setting, LINEUP[name])), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s in all", file=sys.stderr)


def load(name: str, seed: int) -> Trace:
    if name in SYNTHETIC:
        return SYNTHETIC[name](seed)
    if name.startswith("azure:"):
        return azure(Path(name.removeprefix("azure:")))
    return load_mooncake(Path(name), seed)


def _settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    model = EngineModel(
        prefill_tokens_per_second=arguments.prefill_rate,
        context_doubling_tokens=arguments.context_doubling,
        kv_capacity_tokens=arguments.kv_tokens,
        fetch_tokens_per_second=arguments.fetch_rate,
    )
    for num_replicas, speed, num_routers in product(arguments.replicas, arguments.speed, arguments.routers):
        yield Setting(
            speed,
            num_replicas,
            num_routers,
            model,
            arguments.late_ms / 1000,
            arguments.seed,
            _seconds(arguments.peer_ms),
        )


def _seconds(milliseconds: float) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def _row(setting: Setting, name: str, outcome: Outcome) -> str:
    return (
        f"| {setting.speed:g} | {setting.num_replicas} | {setting.num_routers} | {name} | {outcome.hit_rate:.3f} "
        f"| {outcome.mean:.3f} | {outcome.p50:.3f} | {outcome.p90:.3f} | {outcome.p99:.3f} "
        f"| {1000 * outcome.token_mean:.1f} | {1000 * outcome.token_p99:.1f} "
        f"| {outcome.end_mean:.3f} | {outcome.end_p99:.3f} | {outcome.balance:.2f} | {outcome.requests_balance:.2f} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True, help=f"FILE, azure:FILE, or one of {', '.join(SYNTHETIC)}")
    parser.add_argument("--first", type=int, help="so many of its requests; all where not given")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0], help="times the trace's own")
    parser.add_argument("--replicas", type=int, nargs="+", default=[8])
    parser.add_argument("--routers", type=int, nargs="+", default=[1])
    parser.add_argument("--rules", nargs="+", default=list(LINEUP), choices=list(LINEUP), metavar="RULE")
    parser.add_argument("--late-ms", type=float, default=50.0, help="how late KV events and load reports are")
    parser.add_argument(
        "--peer-ms", type=float, default=2.0, help="how late our routers hear each other; negative: not at all"
    )
    parser.add_argument(
        "--decode-slowdowns",
        type=float,
        nargs="*",
        help="of the first engines; else the trace's own",
    )
    parser.add_argument("--seed", type=int, default=0)
    model = EngineModel()
    parser.add_argument("--prefill-rate", type=float, default=model.prefill_tokens_per_second, help="tokens/s")
    parser.add_argument("--context-doubling", type=float, default=model.context_doubling_tokens, help="tokens")
    parser.add_argument("--fetch-rate", type=float, default=model.fetch_tokens_per_second, help="tokens/s from a peer")
    parser.add_argument("--kv-tokens", type=int, default=model.kv_capacity_tokens, help="of one engine")
    return parser


if __name__ == "__main__":
    main()
