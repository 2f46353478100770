"""A real HTTP server on loopback with a real tokenizer and the real wire, before an engine core that is a fake.

The fake repeats each prompt's tokens as the output of each of its sequences, one token a step (a beam's all at once),
and can be told to hang, to die or to fail.
"""

import asyncio
import dataclasses
import json
import multiprocessing
import multiprocessing.process
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
import tokenizers
from tests.runtime.engine.test_detokenizer import sentencepiece_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvasir_runtime.config import CacheConfig, ModelConfig, RuntimeConfig, ServerConfig
from kvasir_runtime.engine.channel import CoreChannel
from kvasir_runtime.engine.messages import (
    Abort,
    AbortRequests,
    Asleep,
    EndRequests,
    EngineFailed,
    EngineReady,
    FromCore,
    MoveRequests,
    RequestsEnd,
    RequestsMove,
    ResetPrefixCache,
    Sleep,
    StepOutputs,
    WakeUp,
)
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import PlainTokens, SequenceOutput, TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.server.admission import API_LIMITS, ApiLimits
from kvasir_runtime.server.launch import ApiServer, listen, run_api_server
from kvasir_runtime.server.model_digest import model_digest
from kvasir_runtime.transfer.metrics import TransferStats
from kvasir_runtime.transfer.params import KvTransferParams

MAX_MODEL_LEN = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "def main() -> None:", "größer, naïve, 日本語, 😀"] * 20


@dataclass
class FakeSequence:
    request: AddRequest
    index: int
    num_output: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return self.request.spec.sampling


class FakeCore:
    """An engine core in a thread. All attributes may be changed while it runs."""

    def __init__(self, ipc_dir: Path, vocab_size: int, api_server_count: int = 1) -> None:
        self._channel = CoreChannel(ipc_dir, api_server_count)
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._active: dict[tuple[str, int], FakeSequence] = {}
        self._num_steps = 0
        self._is_closing = False
        self._scored: set[str] = set()
        """Requests whose prompt's log-probabilities are out."""
        self.received: list[AddRequest] = []
        self.aborted: list[Abort] = []
        self.num_resets = 0
        self.is_hanging = False
        self.step_seconds = 0.001
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.is_too_large = False
        self.kv_transfer_params: KvTransferParams | None = None
        """With the end of each request."""
        self._thread = threading.Thread(target=self._run)

    def start(self, *, send_ready: bool = True) -> None:
        self._thread.start()
        if send_ready:
            self.send_ready()

    def send_ready(self) -> None:
        ready = EngineReady(
            max_model_len=MAX_MODEL_LEN,
            max_model_len_cut_from=2 * MAX_MODEL_LEN,
            max_num_seqs=64,
            vocab_size=self._vocab_size,
            num_blocks=100,
            block_size=16,
            device="cpu",
            attention_backend="reference",
            startup_seconds={"load_weights": 0.5},
            kv_capacity_tokens=1600,
            instance="cafe",
        )
        self._tell(ready)

    def send_nonsense(self) -> None:
        """A message that no API process can make sense of."""
        self._tell({"type": "Nonsense"})  # type: ignore[arg-type]

    def tell_stats(self, **figures: float | TransferStats) -> None:
        """Statistics without a step, as of a core that becomes idle."""
        stats = msgspec.structs.replace(self._stats(), **figures)
        self._tell(StepOutputs(outputs=[], stats=stats))

    def wait_until(self, is_true: Callable[["FakeCore"], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_true(self), timeout=5), "the core never saw it"

    def die(self, last_word: str | None = None) -> None:
        """As a process killed by the kernel, or with a last word."""
        if last_word is not None:
            self._tell(EngineFailed(error=last_word))
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._is_closing = True
            self._thread.join()
            self._channel.close()

    def _tell(self, message: FromCore, api_index: int | None = None) -> None:
        """None: all API processes. From the core's thread or a test's, whereas a socket serves one at a time."""
        with self._changed:
            if api_index is None:
                self._channel.broadcast(message)
            else:
                self._channel.send(api_index, message)

    def _run(self) -> None:
        while not self._is_closing:
            self._receive()
            if self._active and not self.is_hanging:
                self._step()
                time.sleep(self.step_seconds)

    def _receive(self) -> None:
        is_busy = self._active and not self.is_hanging
        for message in self._channel.receive(0 if is_busy else 0.01):
            with self._changed:
                match message:
                    case AddRequest():
                        self.received.append(message)
                        for start in message.sequences:
                            sequence = FakeSequence(message, start.index, len(start.output_token_ids))
                            self._active[message.request_id, start.index] = sequence
                    case AbortRequests():
                        self.aborted += message.aborts
                        for abort in message.aborts:
                            self._abort(abort)
                    case EndRequests():
                        self._tell(RequestsEnd(names=message.names))
                    case ResetPrefixCache():
                        self.num_resets += 1
                    case Sleep():
                        self._active.clear()
                        self._tell(Asleep(level=message.level))
                    case WakeUp():
                        self.send_ready()
                    case MoveRequests():
                        one = message.http_request_id
                        self._tell(RequestsMove(host="10.0.0.9", port=5601, http_request_id=one))
                self._changed.notify_all()

    def _abort(self, abort: Abort) -> None:
        for request_id, index in list(self._active):
            if request_id == abort.request_id and abort.index in (None, index):
                del self._active[request_id, index]

    def _step(self) -> None:
        self._num_steps += 1
        by_api: dict[int, list[SequenceOutput]] = {}
        for sequence in list(self._active.values()):
            output = self._continue(sequence)
            by_api.setdefault(sequence.request.api_index, []).append(output)
            if output.finish_reason is not None:
                del self._active[sequence.request.request_id, sequence.index]
        self._tell(StepOutputs(outputs=[], stats=self._stats()))
        for api_index, outputs in by_api.items():
            self._tell(step_outputs(outputs, self._stats()), api_index)

    def _continue(self, sequence: FakeSequence) -> SequenceOutput:
        request, sampling = sequence.request, sequence.sampling
        if self.error is not None:
            return SequenceOutput(
                request_id=request.request_id,
                index=sequence.index,
                new_token_ids=[],
                finish_reason="error",
                error=self.error,
                is_too_large=self.is_too_large,
            )
        if request.spec.beam is not None:
            token_ids = request.spec.prompt_token_ids[: sampling.max_tokens]
            return SequenceOutput(
                request_id=request.request_id, index=sequence.index, new_token_ids=token_ids, finish_reason="length"
            )
        prompt = request.spec.prompt_token_ids
        token_id = prompt[sequence.num_output % len(prompt)]
        sequence.num_output += 1
        is_first = sequence.num_output == 1
        is_stop = token_id in sampling.stop_token_ids and sequence.num_output > sampling.min_tokens
        is_full = sequence.num_output >= sampling.max_tokens
        return SequenceOutput(
            request_id=request.request_id,
            index=sequence.index,
            new_token_ids=[token_id],
            logprobs=None if sampling.logprobs is None else [_logprobs(token_id, sampling.logprobs, sequence.index)],
            prompt_logprobs=self._prompt_logprobs(request) if is_first else None,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
            finish_reason="stop" if is_stop else "length" if is_full else None,
            stop_token_id=token_id if is_stop else None,
            kv_transfer_params=self.kv_transfer_params if is_stop or is_full else None,
        )

    def _prompt_logprobs(self, request: AddRequest) -> list[TokenLogprobs | None] | None:
        if request.spec.sampling.prompt_logprobs is None or request.request_id in self._scored:
            return None
        self._scored.add(request.request_id)
        prompt = request.spec.prompt_token_ids
        return [None, *(_logprobs(token_id, request.spec.sampling.prompt_logprobs) for token_id in prompt[1:])]

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._active),
            num_waiting=0,
            num_blocks_used=25,
            num_blocks=100,
            num_steps=self._num_steps,
            num_preemptions=3,
            num_prefix_queries=40,
            num_prefix_hits=30,
            last_step_time=time.time(),
        )


def step_outputs(outputs: list[SequenceOutput], stats: SchedulerStats) -> StepOutputs:
    """As the core sends them: those that are nothing but tokens in columns."""
    plain = PlainTokens([], [], [], [])
    others = []
    for output in outputs:
        if output == SequenceOutput(
            request_id=output.request_id, index=output.index, new_token_ids=output.new_token_ids
        ):
            plain.request_ids.append(output.request_id)
            plain.indices.append(output.index)
            plain.num_tokens.append(len(output.new_token_ids))
            plain.token_ids.extend(output.new_token_ids)
        else:
            others.append(output)
    return StepOutputs(outputs=others, stats=stats, plain=plain)


def _logprobs(token_id: int, count: int, index: int = 0) -> TokenLogprobs:
    """The later a sequence, the likelier its tokens."""
    return TokenLogprobs(
        [token_id, *range(count)], [-0.5 + index / 8, *(-1.0 - index for index in range(count))], rank=1
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an API process reads of a checkpoint: tokenizer, chat template, end-of-sequence ids."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    recommended = {"temperature": 0.6, "top_k": 20, "eos_token_id": [0, -1, 2**70]}  # some end with no token at all
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@dataclass
class Running:
    """A server that runs, and everything behind it."""

    url: str
    listener: socket.socket
    core: FakeCore
    server: ApiServer
    tokenizer: tokenizers.Tokenizer
    model_digest: str
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    exit_codes: list[int]
    """One, when it has ended."""

    def wait_idle(self) -> None:
        """Until no request is counted any more, which is shortly after a client has read its last byte."""
        asyncio.run_coroutine_threadsafe(self.server.admission.wait_idle(), self.loop).result(5)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=10, verify=False)

    @cached_property
    def client(self) -> openai.OpenAI:
        return self.client_with("none")

    def client_with(self, api_key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, http_client=self.http)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)


@contextmanager
def running_server(
    model_folder: Path,
    ipc_dir: Path,
    *,
    is_ready: bool = True,
    config: ServerConfig | None = None,
    shutdown_timeout: float = 5.0,
    vocab_size: int | None = None,
    cache: CacheConfig | None = None,
    limits: ApiLimits = API_LIMITS,
) -> Iterator[Running]:
    config = dataclasses.replace(config or ServerConfig(), shutdown_timeout=shutdown_timeout)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    core = FakeCore(ipc_dir, vocab_size or tokenizer.get_vocab_size())
    started: list[tuple[ApiServer, asyncio.AbstractEventLoop]] = []
    exit_codes: list[int] = []
    has_started = threading.Event()

    async def serve() -> None:
        runtime_config = RuntimeConfig(
            model=ModelConfig(model=str(model_folder)), cache=cache or CacheConfig(), server=config
        )
        server = ApiServer(runtime_config, 0, [listener], ipc_dir, limits)
        started.append((server, asyncio.get_running_loop()))
        has_started.set()
        exit_codes.append(await server.run())

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert has_started.wait(10)
    core.start(send_ready=is_ready)
    digest = model_digest(model_folder, model_folder)
    running = Running(url, listener, core, started[0][0], tokenizer, digest, thread, started[0][1], exit_codes)
    try:
        if is_ready:
            wait_ready(running.http)
        yield running
    finally:
        if thread.is_alive():
            running.loop.call_soon_threadsafe(running.server.stop)
            running.loop.call_soon_threadsafe(running.server.stop)
        running.http.close()
        thread.join()
        core.close()


def wait_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, "the server never became ready"


@pytest.fixture(scope="session")
def shared(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(model_folder, tmp_path_factory.mktemp("ipc")) as running:
        yield running


@pytest.fixture
def running(shared: Running) -> Running:
    """The server that tests share as long as they leave it as it was; the core starts as new."""
    core = shared.core
    core.received, core.aborted = [], []
    core.is_hanging, core.step_seconds, core.num_cached_tokens, core.error = False, 0.001, 0, None
    core.is_too_large = False
    return shared


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With a tokenizer whose decoder strips a text's first space."""
    folder = tmp_path_factory.mktemp("models") / "m"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(sentencepiece_like().to_json())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    with running_server(folder, folder) as running:
        yield running


@pytest.fixture
def start_server(model_folder: Path, tmp_path: Path) -> Callable[..., AbstractContextManager[Running]]:
    """For tests that need a server of their own."""
    return partial(running_server, model_folder, tmp_path)


@dataclass
class Processes:
    """API processes of their own that share one port and one core."""

    url: str
    core: FakeCore
    processes: list[multiprocessing.process.BaseProcess]


@contextmanager
def running_processes(model_folder: Path, ipc_dir: Path, count: int) -> Iterator[Processes]:
    config = RuntimeConfig(
        model=ModelConfig(model=str(model_folder)), server=ServerConfig(api_server_count=count, shutdown_timeout=10.0)
    )
    listener = listen("127.0.0.1", 0)
    core = FakeCore(ipc_dir, 320, count)
    core.start()
    spawn = multiprocessing.get_context("spawn")
    arguments = [(config, index, [listener], ipc_dir) for index in range(count)]
    processes = [spawn.Process(target=run_api_server, args=each) for each in arguments]
    for process in processes:
        process.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    try:
        with httpx.Client(base_url=url, timeout=30) as http:
            wait_ready(http)
        yield Processes(url, core, list(processes))
    finally:
        for process in processes:
            process.kill()
            process.join()
        core.close()


@pytest.fixture
def start_processes(model_folder: Path, tmp_path: Path) -> Callable[[int], AbstractContextManager[Processes]]:
    return partial(running_processes, model_folder, tmp_path)
