"""How autoscaling rules keep an SLO over a trace, and what that costs, in virtual time.

    python -m benchmarks.autoscaling --traces ../shared/traces --trace azure mooncake ramp step bursts nights diurnal

Each rule is tried with several values of its own threshold, so that rules can be compared where they keep the SLO
equally often. Prints a table a trace: share of requests within the SLO, replica-hours, the most replicas at once,
changes, changes of direction, hours of replicas that were let go before they had served for five minutes, and how
often and how long it woke from zero, which it may on the trace `nights` alone.
With `--rules oracle` what whoever knows the trace would need, for several prices of a request in time (`oracle.py`).
`python -m benchmarks.autoscaling.compare FILE` says what kvasir saves, off tables of this program.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.autoscaling.lineup import LINEUP, MakeRules
from benchmarks.autoscaling.oracle import ORACLE, PRICES, oracle
from benchmarks.autoscaling.simulation import Outcome, Setting, simulate
from benchmarks.autoscaling.traffic import DRAWN, SHAPES, load
from benchmarks.routing.engine import EngineModel
from benchmarks.routing.trace import Trace

# About a model of 8 billion parameters on an L4, and on an H100 for the long prompts.
_SMALL = EngineModel(2500.0, 32768.0, 60_000, 128, 0.025, 2e-7)
_LARGE = EngineModel(9000.0, 65536.0, 500_000, 512, 0.010, 3e-8)
_HEAD = "| rule | threshold | in SLO, % | replica-hours | most | changes | turns | wasted hours | wakes, p50 |"


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.split and ORACLE in arguments.rules:
        parser.error("the oracle plans one role: leave --split out")
    for name in arguments.trace:
        trace = load(name, arguments.traces, arguments.seed)
        setting = setting_of(name, arguments.startup, is_split=arguments.split)
        title = f"{name}-split" if arguments.split else name
        print(f"\n{title}: {len(trace.requests)} requests\n\n{_HEAD}\n" + "|---" * 9 + "|", flush=True)
        begin = time.perf_counter()
        for rule in arguments.rules:
            make, thresholds = _tried(rule, trace)
            for threshold in thresholds:
                print(_row(rule, threshold, simulate(trace, setting, make(threshold, setting))), flush=True)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def _tried(rule: str, trace: Trace) -> tuple[MakeRules, tuple[float, ...]]:
    return (partial(oracle, trace), PRICES) if rule == ORACLE else LINEUP[rule]


def setting_of(name: str, startup_seconds: float, *, is_split: bool = False) -> Setting:
    can_sleep = name == "nights"
    if name == "mooncake":
        return Setting(_LARGE, 8.0, 0.1, startup_seconds, 4, is_split, can_sleep)
    return Setting(_SMALL, 3.0, 0.1, startup_seconds, 2, is_split, can_sleep)


def _row(rule: str, threshold: float, outcome: Outcome) -> str:
    p50 = outcome.wake_p50_seconds
    wakes = "" if p50 is None else f"{len(outcome.wake_seconds)}, {p50:.0f} s"
    return (
        f"| {rule} | {threshold:g} | {100 * outcome.attainment:.1f} | {outcome.replica_hours:.2f} | {outcome.peak} "
        f"| {outcome.num_changes} | {outcome.num_turns} | {outcome.wasted_hours:.2f} | {wakes} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.autoscaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ["azure", "mooncake", *SHAPES, *DRAWN]
    parser.add_argument("--traces", type=Path, required=True, help="folder of the recorded traces")
    parser.add_argument("--trace", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--rules", nargs="+", default=list(LINEUP), choices=[*LINEUP, ORACLE], metavar="RULE")
    parser.add_argument("--startup", type=float, default=120.0, help="seconds until a replica serves")
    parser.add_argument("--split", action="store_true", help="prefill and decode apart, each with a fleet of its own")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
