"""`kvasir-operator run` as a process of its own, as its Deployment would run it."""

import os
import signal
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .processes import die_with_parent, wait_until

PROGRAM = Path(sysconfig.get_path("scripts")) / "kvasir-operator"
START_SECONDS = 120.0  # a bound for a crowded machine; a quiet one takes 2


@dataclass(frozen=True)
class OperatorProcess:
    """A started operator; its probes and metrics are at `url` once it is up."""

    process: subprocess.Popen[bytes]
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
    """Starts the operator with its log in `log`, and kills it at the end if it still runs."""
    command = [str(PROGRAM), "run", f"--kubeconfig={kubeconfig}", "--host=127.0.0.1", "--port=0", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent, env=dict(os.environ)
        )
    operator = OperatorProcess(process, log)
    try:
        yield operator
    finally:
        if process.poll() is None:
            operator.kill()
