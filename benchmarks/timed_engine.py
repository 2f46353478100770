"""An engine that writes down what becomes of the KV blocks that it gives or takes (a part of disaggregation.py).

    KVASIR_BENCH_TRANSFERS=FILE python benchmarks/timed_engine.py serve MODEL ...

is `python -m kvasir_runtime serve MODEL ...`, and adds lines of JSON to FILE: `written` once blocks are that another
engine is to have, `reading` and `read` of each read of a pull, `ended` of the pull; `blocks`: how many, `at`: seconds
of the machine's monotonic clock, which is the same in all its processes.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import kvasir_runtime.transfer.launch
from kvasir_runtime.cli import main
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import FromAgent, OfferBlocks, PullEnded, ToAgent
from kvasir_runtime.transfer.connector import PagePair, ReadState
from kvasir_runtime.transfer.nixl import NixlConnector

FILE = "KVASIR_BENCH_TRANSFERS"


def note(event: str, num_blocks: int) -> None:
    line = {"event": event, "blocks": num_blocks, "at": time.monotonic()}
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


class TimedAgent(TransferAgent):
    """Commands are noted as the core gives them, a pull's end as the core hears of it."""

    def post(self, *commands: ToAgent) -> None:
        for command in commands:
            if isinstance(command, OfferBlocks):
                note("written", len(command.blocks))
        super().post(*commands)

    def take(self) -> list[FromAgent]:
        events = super().take()
        for event in events:
            if isinstance(event, PullEnded):
                note("ended", event.num_blocks)
        return events


class TimedConnector(NixlConnector):
    """The end of a read is noted when it is noticed, which is looked for each millisecond."""

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        note("reading", len(pairs))
        return super().start_read(engine_id, pairs)

    def state(self, read: int) -> ReadState:
        state = super().state(read)
        if state == "done":
            note("read", 0)
        return state


if __name__ in ("__main__", "__mp_main__"):  # the engine core is spawned, and imports this module as the latter
    kvasir_runtime.transfer.launch.TransferAgent = TimedAgent  # type: ignore[misc]
    kvasir_runtime.transfer.launch.NixlConnector = TimedConnector  # type: ignore[misc]

if __name__ == "__main__":
    main()
