"""`kvasir-operator run` as a process of its own, as its Deployment would run it.

Most tests fork it from a server that has imported it already: importing Kubernetes' client takes longer than all that a
short-lived operator does.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from kvasir_operator.cli import main

from .processes import die_with_parent, wait_until

PROGRAM = Path(sysconfig.get_path("scripts")) / "kvasir-operator"
START_SECONDS = 120.0  # a bound for a crowded machine; a quiet one takes 2


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["kvasir_operator.cli", "kvasir_operator.run"])


class ForkedProcess:
    """What a test asks of a subprocess.Popen, of a process that the fork server began."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"process {self.pid} goes on after {seconds:g} s")
        return status


@dataclass(frozen=True)
class OperatorProcess:
    """A started operator; its probes and metrics are at `url` once it is up."""

    process: subprocess.Popen[bytes] | ForkedProcess
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.word_after('metrics and probes on ')}"

    def word_after(self, text: str) -> str:
        """What follows `text` in the log, once it is there; AssertionError with the log when the process ended."""

        def found() -> str:
            content = self.log.read_text()
            assert self.process.poll() is None or text in content, content
            return content.partition(text)[2].partition("\n")[0]

        try:
            return wait_until(found, START_SECONDS, f"the operator to log {text!r}")
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.log.read_text()}") from error

    def word_before(self, text: str) -> str:
        """The last word of what precedes `text` in the log, once it is there."""
        self.word_after(text)
        return self.log.read_text().partition(text)[0].rsplit(maxsplit=1)[-1]

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def passes(self) -> float:
        """How many passes have ended, well or not."""
        return self._sum("kvasir_operator_reconcile_total{")

    def writes(self, verb: str, kind: str) -> float:
        """How many writes the API server accepted, dry runs not among them."""
        return self._sum(f'kvasir_operator_api_requests_total{{kind="{kind}",result="success",verb="{verb}"')

    def _sum(self, start: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.get("/readyz") == (200, "ok"), START_SECONDS, "the operator to be ready")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> tuple[int, float]:
        """SIGTERM; returns the exit status and the seconds that it took."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30), time.monotonic() - started


@contextmanager
def running_operator(kubeconfig: Path, log: Path, *flags: str) -> Iterator[OperatorProcess]:
    """Starts the installed program with its log in `log`, and kills it at the end if it still runs."""
    command = [str(PROGRAM), *arguments(kubeconfig, flags)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent, env=dict(os.environ)
        )
    with killed_at_the_end(OperatorProcess(process, log)) as operator:
        yield operator


@contextmanager
def forked_operator(kubeconfig: Path, log: Path, *flags: str) -> Iterator[OperatorProcess]:
    """As `running_operator`, but for what an installed program does before its `main`."""
    log.touch()
    process = FORKS.Process(target=run_main, args=(arguments(kubeconfig, flags), log, dict(os.environ)))
    process.start()
    with killed_at_the_end(OperatorProcess(ForkedProcess(process), log)) as operator:
        yield operator


def arguments(kubeconfig: Path, flags: Sequence[str]) -> list[str]:
    return ["run", f"--kubeconfig={kubeconfig}", "--host=127.0.0.1", "--port=0", *flags]


def run_main(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """In the forked process."""
    die_with_parent()
    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(arguments))


@contextmanager
def killed_at_the_end(operator: OperatorProcess) -> Iterator[OperatorProcess]:
    try:
        yield operator
    finally:
        if operator.process.poll() is None:
            operator.kill()
