"""What it costs to part prefill from decode on this machine, and what it gains.

    python benchmarks/disaggregation.py --trace mooncake_conversation_trace.jsonl [--model llama-100m]

writes benchmarks/results/disaggregation-DATE.md: bandwidth, checksums and overlap of KV pulls between two processes
(kv_blocks.py), how much of real engines' transfers lies beside their prefill (transfer_overlap.py), then times to the
first token and between tokens of mixed and of split engines on the same two cores, behind the real router
(mixed_and_split.py). `--only PART` prints one part and writes nothing.
"""

import argparse
import os
import sys
from datetime import date
from pathlib import Path

from kv_blocks import kv_blocks
from mixed_and_split import WAYS, mixed_and_split, read_trace
from random_models import CONFIGS, make_model
from servers import WORK, end_on_sigterm, this_machine
from transfer_overlap import transfer_overlap

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    end_on_sigterm()
    options = parsed_options()
    model, work = options.model, options.work
    parts = [heading()]
    if options.only in (None, "pulls"):
        parts.append(kv_blocks(options.mib, options.pulls, options.device, options.page_kib))
    if options.only in (None, "overlap"):
        parts.append(transfer_overlap(make_model(model, work / "models"), options.lengths, options.prompts, work))
    if options.only in (None, "engines"):
        trace = read_trace(options.trace, options.requests, options.rate, options.shorter_input, options.shorter_output)
        parts.append(mixed_and_split(make_model(model, work / "models"), trace, options.ways, options.rounds, work))
    report = "\n\n".join(parts) + "\n"
    if options.only is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"disaggregation-{date.today()}.md").write_text(report)
    print(report, flush=True)


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("pulls", "overlap", "engines"), help="one part, which is printed alone")
    parser.add_argument("--mib", type=int, default=128, help="moved by each pull")
    parser.add_argument("--pulls", type=int, default=7, help="of each kind; the median is shown")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[16, 128, 1024], help="sizes of the blocks pulled")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that pulled blocks are on")
    parser.add_argument("--model", choices=tuple(CONFIGS), default="llama-100m", help="with random weights")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 3584], help="tokens of prompts to transfer")
    parser.add_argument("--prompts", type=int, default=7, help="of each length; medians are shown")
    parser.add_argument("--trace", type=Path, help="of requests, in the form of Mooncake's traces (JSON lines)")
    parser.add_argument("--requests", type=int, default=120, help="taken from the trace's beginning")
    parser.add_argument("--rate", type=float, default=0.6, help="requests a second, on average")
    parser.add_argument("--shorter-input", type=int, default=16, help="the trace's prompts are divided by so much")
    parser.add_argument("--shorter-output", type=int, default=8, help="the trace's answers are divided by so much")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="in which the engines are set up")
    parser.add_argument("--rounds", type=int, default=3, help="of all ways in turn")
    parser.add_argument("--work", type=Path, default=WORK, help="where models and the servers' logs are kept")
    options = parser.parse_args()
    if options.only in (None, "engines") and options.trace is None:
        parser.error("the engines are measured with a trace: give --trace FILE, or --only pulls or overlap")
    return options


def heading() -> str:
    return (
        f"# Prefill apart from decode, {date.today()}\n\n"
        f"`python benchmarks/disaggregation.py {' '.join(sys.argv[1:])}` at {this_machine()}; "
        f"load average at the start {os.getloadavg()[0]:.1f}."
    )


if __name__ == "__main__":
    main()
