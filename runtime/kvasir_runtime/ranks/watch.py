"""Hears what ranks say, and tells once when one of them has failed: the whole group has then.

The first sign is not always the cause: where one rank is killed, its neighbours find their connections broken and may
be heard before. So everything that is known after a moment is weighed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from multiprocessing.process import BaseProcess

from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.heartbeat import BEAT_SECONDS
from kvasir_runtime.parallel.counts import CountsByGroup
from kvasir_runtime.ranks.evidence import FailureEvidence
from kvasir_runtime.ranks.executor import RankExecutor
from kvasir_runtime.ranks.links import CoreLinks
from kvasir_runtime.ranks.liveness import RankLiveness
from kvasir_runtime.ranks.messages import (
    FromRank,
    GrammarPrepared,
    IdleWorkDone,
    RankCame,
    RankFailed,
    RankProgress,
    RankReady,
    StepDone,
    StepFailed,
)
from kvasir_runtime.ranks.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

EVIDENCE_SECONDS = 0.5
"""Between the first sign of a failure and the verdict."""


class RankWatch:
    """A thread that owns the receiving end of the links. Before `descriptions` are complete a failure is told by
    them, afterwards by `on_failure`, which is called once, on this thread."""

    def __init__(
        self,
        links: CoreLinks,
        executor: RankExecutor,
        processes: Mapping[int, BaseProcess],
        rendezvous: Rendezvous,
        liveness: RankLiveness,
        show_counts: Callable[[Iterable[CountsByGroup]], None],
        on_failure: Callable[[RankFailedError], None],
    ) -> None:
        """`processes` are those of this node, by rank. `show_counts` is told what ranks exchanged, all of them."""
        self.descriptions: Future[list[RankDescription]] = Future()
        """Of all ranks, once all are ready."""
        self._links = links
        self._executor = executor
        self._processes = processes
        self._ready: dict[int, RankDescription] = {}
        self._rendezvous = rendezvous
        self._counts: dict[int, CountsByGroup] = {}
        self._show_counts = show_counts
        self._liveness = liveness
        self._on_failure = on_failure
        self._evidence = FailureEvidence()
        self._has_to_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What ends from now on has been asked to."""
        self._has_to_end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without a watch nobody would be told of anything: the group ends
            logger.exception("the watch over the ranks failed")
            self._tell(RankFailedError(f"the watch over the ranks failed: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        last_look = time.monotonic()
        while not self._has_to_end.is_set() and not self._evidence:
            self._look(BEAT_SECONDS)
            now = time.monotonic()
            self._pass_time(now - last_look)
            last_look = now
        if not self._has_to_end.is_set():
            self._gather_evidence()
            if (missing := self._rendezvous.missing()) is not None:
                self._evidence.add_problem(missing)
            self._tell(RankFailedError(self._evidence.verdict()))

    def _pass_time(self, seconds: float) -> None:
        self._liveness.sent(self._executor.num_steps, self._executor.awaits_results)
        for judge in (self._liveness, self._rendezvous):
            judge.pass_time(seconds)
            if (problem := judge.problem()) is not None:
                self._evidence.add_problem(problem)
        if (warning := self._rendezvous.warning()) is not None:
            logger.warning("%s", warning)

    def _look(self, timeout_seconds: float) -> None:
        """Take what has been said, and note who has ended."""
        running = [process.sentinel for rank, process in self._processes.items() if not self._evidence.has_ended(rank)]
        for message in self._links.receive(timeout_seconds, running):
            self._take(message)
        for rank, process in self._processes.items():
            if process.exitcode is not None:
                self._evidence.add_end(rank, process.exitcode)
        for rank in self._links.lost_ranks - self._processes.keys():
            self._evidence.add_loss(rank)

    def _take(self, message: FromRank) -> None:
        match message:
            case StepDone(result=result):
                self._executor.finish_step(result)
            case StepFailed(error=error):
                self._executor.fail_step(error)
            case RankCame():
                self._rendezvous.come(message.rank)
            case RankProgress():
                self._hear(message)
            case RankReady():
                self._ready[message.rank] = message.description
                if len(self._ready) == self._rendezvous.num_ranks:
                    self.descriptions.set_result([self._ready[rank] for rank in range(self._rendezvous.num_ranks)])
            case GrammarPrepared(number=number):
                self._executor.finish_grammar(number)
            case IdleWorkDone(has_more=has_more):
                self._executor.finish_idle_work(has_more)
            case RankFailed():
                self._evidence.add_word(message)

    def _hear(self, progress: RankProgress) -> None:
        self._counts[progress.rank] = progress.counts
        self._show_counts(self._counts.values())
        self._liveness.hear(progress.rank, progress.num_steps, progress.num_calls)

    def _gather_evidence(self) -> None:
        deadline = time.monotonic() + EVIDENCE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not self._has_to_end.is_set():
            self._look(left)

    def _tell(self, failure: RankFailedError) -> None:
        if not self.descriptions.done():
            self.descriptions.set_exception(failure)
        elif not self._has_to_end.is_set():
            self._on_failure(failure)
