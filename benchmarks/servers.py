"""A server that a benchmark starts: a process group of its own, so that it can be paused, stopped and looked at from
outside with all its children; and where one from the package index is installed.
"""

import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "bench"
START_LIMIT_SECONDS = 600


@dataclass
class Server:
    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, log: Path) -> float:
        """Seconds until it answers that it is ready."""
        begin = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=os.environ | self.environment, start_new_session=True
            )
        while not self._is_ready():
            if self.process.poll() is not None or time.perf_counter() - begin > START_LIMIT_SECONDS:
                raise SystemExit(f"{self.name} did not become ready; see {log}")
            time.sleep(0.1)
        return time.perf_counter() - begin

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self.process.wait()

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._pids():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        """Proportional set size of all its processes: shared pages count once."""
        total = 0
        for pid in self._pids():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024

    def _pids(self) -> list[int]:
        """Everything in the session that it leads."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                except OSError:
                    continue
                if session == self.process.pid:
                    found.append(int(entry.name))
        return found

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready_path, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that keep a core busy each, as others on a shared node do."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def end_on_sigterm() -> None:
    """SIGTERM then ends the benchmark as an error would, so that what it has started is stopped."""

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stopping takes a while, and is not to be interrupted
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def install(
    folder: Path, packages: list[str], overrides: list[str] | None = None, remove: list[str] | None = None
) -> Path:
    """A virtual environment with the packages, from the package index; made once."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        print(f"installing {' '.join(packages)} into {folder}", flush=True)
        uv = str(Path(sys.executable).parent / "uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", "3.11", str(folder)], check=True)
        override_file = folder / "overrides.txt"
        override_file.write_text("\n".join(overrides or []))
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", str(python), "--override", str(override_file), *packages],
            check=True,
        )
        if remove:
            subprocess.run([uv, "pip", "uninstall", "--quiet", "--python", str(python), *remove], check=True)
        done.touch()
    return python


class OtherWork:
    """Cores kept busy by neither the servers that are measured nor this process and those it has waited for."""

    def __init__(self) -> None:
        self._num_cores: list[float] = []

    @contextmanager
    def than(self, *servers: Server) -> Iterator[None]:
        begin, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds(servers)
        yield
        others = _busy_seconds() - busy - (_own_seconds(servers) - own)
        self._num_cores.append(others / (time.perf_counter() - begin))

    def __str__(self) -> str:
        return f"{statistics.median(self._num_cores):.2f} cores (median), {max(self._num_cores):.2f} (most)"


def _own_seconds(servers: Iterable[Server]) -> float:
    return sum(os.times()[:4]) + sum(server.cpu_seconds() for server in servers)


def _busy_seconds() -> float:
    """CPU time of the whole machine that was neither idle nor waiting for a disk."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def this_machine() -> str:
    """Commit, processor, cores and kernel, as the head of a table names them."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return f"commit {commit or 'none'}; {cpu.split(':')[1].strip()}, {os.cpu_count()} cores, Linux {platform.release()}"
