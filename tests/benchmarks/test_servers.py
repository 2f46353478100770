"""What a benchmark has started ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = """
import socket, sys, time
from pathlib import Path
from servers import Server, end_on_sigterm

end_on_sigterm()
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = Server("files", [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)], port, ready_path="/")
try:
    server.start(Path(sys.argv[1]))
    print(server.process.pid, flush=True)
    time.sleep(60)
finally:
    server.stop()
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_leaves_no_server_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path / "log")]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert is_running(pid)
        benchmark.terminate()
        assert benchmark.wait(30) == 128 + signal.SIGTERM
    assert not is_running(pid)
