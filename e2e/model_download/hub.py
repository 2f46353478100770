"""The tests' own hub, which has the example model, as a program: open, for those with the token, and for nobody yet.

python -m e2e.model_download.hub ADDRESS PORT BYTES_PER_SECOND

Each request for a file is one JSON line on stdout, `{"path": ..., "offset": ...}`.
"""

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.rig.guest import running_guest
from e2e.cluster.rig.network import IPV4
from tests.runtime.model_sources.hub_server import Asked, Repository, running_hub

MODEL = Path(__file__).parents[2] / "examples" / "models" / "kvasir-python-7m"
OPEN, PRIVATE, GATED = "kvasir/open", "kvasir/private", "kvasir/gated"
DOCUMENTED = "Qwen/Qwen2.5-0.5B-Instruct"
"""With which docs/install.md begins."""
READERS = {OPEN: "everyone", DOCUMENTED: "everyone", PRIVATE: "token", GATED: "nobody"}
NAME, PORT = "hub", 8470


@contextmanager
def serving_hub(bytes_per_second: float) -> Iterator[str]:
    """The URL of one in the network of the rig's control plane, where pods reach it."""
    arguments = [IPV4.control_plane, str(PORT), str(bytes_per_second)]
    with running_guest(NAME, [sys.executable, "-m", "e2e.model_download.hub", *arguments]):
        yield f"http://{IPV4.control_plane}:{PORT}"


class Printed(list[Asked]):
    def append(self, asked: Asked) -> None:
        super().append(asked)
        line = json.dumps(dataclasses.asdict(asked)) + "\n"
        print(line, end="", flush=True)  # in one write: two requests at once have a thread each


def main() -> None:
    address, port, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    with running_hub(address, port) as hub:
        hub.asked = Printed()
        hub.faults.bytes_per_second = rate
        for name, readers in READERS.items():
            hub.repositories[name] = Repository(files, readers)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # threads take it over from here
    main()
