"""Tiny random models of every architecture, what must be said of them, and the real engine core.

In float32 that is what Hugging Face says. In bfloat16, the dtype of the fast path, no two implementations round alike:
there it is, to the last bit, what the plain engine says while it serves nothing else.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import transformers

from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from kvasir_runtime.engine.core import EngineCore, StepExecutor
from kvasir_runtime.engine.core_main import draft_depth
from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.engine.messages import Abort, AbortRequests, FromCore, StepOutputs, ToCore
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.execution.executor import Executor, PendingResult
from kvasir_runtime.execution.platform import Platform
from kvasir_runtime.execution.worker import Worker, load_worker
from kvasir_runtime.requests.add_request import AddRequest, Pooling, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import SequenceOutput, TokenLogprobs
from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.scheduling.scheduler import Scheduler, make_scheduler
from kvasir_runtime.scheduling.step import SchedulerLimits, StepPlan
from kvasir_runtime.speculative.depth import FixedDepth
from kvasir_runtime.speculative.select import proposer_of
from kvasir_runtime.structured.vocabulary import Vocabulary
from kvasir_runtime.transfer.params import KvTransferParams

Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
NUM_NEW_TOKENS = 48
BLOCK_SIZE = 8
MAX_MODEL_LEN = 112
MAX_NUM_SEQS = 8
MAX_NUM_BATCHED_TOKENS = 512
WINDOW = 20
NUM_CANDIDATES = 20
"""Pairs of prompts of a length, of which a reference takes the first that leaves nothing to rounding."""
SMALLEST_MARGIN = 5e-4
"""Between the two best logits of a reference, and between its last chosen expert and the next: less could be decided by
how a processor rounds."""

VOCAB_SIZE = 320
TOLERANCES: dict[Dtype, float] = {"bfloat16": 0.0, "float32": 1e-4}
"""Of a log-probability. In float32 the reference adds up in another order."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,  # heads of 32, as the compiled attention by bf16 dot products wants them
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "query_pre_attn_scalar": 1,
    "head_dim": 32,
}

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 32}),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 32}),
    "Gemma2ForCausalLM": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 10.0}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GEMMA),
    "Phi3ForCausalLM": ("Phi3Config", {"partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "MixtralForCausalLM": ("MixtralConfig", EXPERTS | {"sliding_window": WINDOW}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        EXPERTS | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
}


@dataclass(frozen=True)
class Reference:
    """What must be said: for each prompt 48 greedy tokens, and log-probabilities of every next token."""

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[torch.Tensor]  # each [len(prompt) + 48, vocab_size], of the token after each position
    dtype: Dtype = "float32"

    def check(self, generated: "Generated", name: str, index: int, cut: int = 0) -> None:
        """A prompt's output but for its first `cut` tokens, and its log-probabilities where they were asked for."""
        assert generated.token_ids(name) == self.outputs[index][cut:], name
        entries = generated.logprobs(name)
        if not entries:
            return
        own = self.logprobs[index][len(self.prompts[index]) - 1 + cut :][: len(entries)]
        token_ids = torch.tensor([entry.token_ids for entry in entries])
        found = torch.tensor([entry.logprobs for entry in entries])
        closeness = {"atol": TOLERANCES[self.dtype], "rtol": 0.0}
        torch.testing.assert_close(found, own.gather(1, token_ids), **closeness)
        torch.testing.assert_close(found[:, 1:], own.topk(found.shape[1] - 1).values, **closeness)


@dataclass(frozen=True)
class Features:
    """How the engine is run; the defaults are the plainest way."""

    prefix_cache: bool = False
    chunked: bool = False
    few_blocks: bool = False
    one_step_ahead: bool = False
    three_steps_ahead: bool = False


PLAIN = Features()


@dataclass
class MemoryChannel:
    """The engine core's connection to its clients, kept in lists."""

    waiting: list[ToCore] = field(default_factory=list)
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    """Of each sequence: `request` for a request's first, `request.1`, ... for the others."""
    sent: list[FromCore] = field(default_factory=list)
    stats: SchedulerStats | None = None
    wake: threading.Event = field(default_factory=threading.Event)
    """Set by what happens beside the channel."""
    may_sleep: bool = False

    def receive(self, timeout_seconds: float | None) -> list[ToCore]:
        if timeout_seconds is None and not self.waiting:
            assert self.may_sleep, "the engine would sleep for ever"
            assert self.wake.wait(20), "nothing woke the engine"
            self.wake.clear()
        messages, self.waiting = self.waiting, []
        return messages

    def send(self, api_index: int, message: FromCore) -> None:
        assert isinstance(message, StepOutputs)
        self.sent.append(message)
        self.stats = message.stats
        for output in message.outputs:
            self._keep(output)
        if message.plain is not None:
            plain, tokens = message.plain, iter(message.plain.token_ids)
            for request_id, index, number in zip(plain.request_ids, plain.indices, plain.num_tokens, strict=True):
                new = [next(tokens) for _ in range(number)]
                self._keep(SequenceOutput(request_id=request_id, index=index, new_token_ids=new))

    def _keep(self, output: SequenceOutput) -> None:
        self.outputs.setdefault(name_of(output.request_id, output.index), []).append(output)

    def forget(self, api_index: int) -> None:
        """None dies."""

    def broadcast(self, message: FromCore) -> None:
        assert isinstance(message, StepOutputs)
        self.sent.append(message)
        self.stats = message.stats


def name_of(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}.{index}"


@dataclass(frozen=True)
class Generated:
    outputs: dict[str, list[SequenceOutput]]
    stats: SchedulerStats

    def token_ids(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def logprobs(self, request_id: str) -> list[TokenLogprobs]:
        return [entry for output in self.outputs[request_id] for entry in output.logprobs or ()]


class WatchedExecutor:
    """Notes which sequences its executor is given, and how many steps are under way."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self.num_under_way = 0
        self.num_admitted: Counter[tuple[tuple[int, ...], int]] = Counter()
        """By prompt and seed."""

    def forward(self, plan: StepPlan) -> None:
        self.num_admitted.update((tuple(new.spec.prompt_token_ids), new.spec.sampling.seed) for new in plan.added)
        self._executor.forward(plan)

    def sample(self) -> Any:
        self.num_under_way += 1
        return WatchedStep(self._executor.sample(), self)

    def prepare_grammar(self, grammar: str) -> Any:
        return self._executor.prepare_grammar(grammar)

    def recover(self) -> None:
        self._executor.recover()

    def use_idle_time(self) -> None:
        self._executor.use_idle_time()


@dataclass(frozen=True)
class WatchedStep:
    step: Future[PendingResult]
    watched: WatchedExecutor

    def result(self) -> PendingResult:
        self.watched.num_under_way -= 1
        return self.step.result()

    def exception(self) -> BaseException | None:
        self.watched.num_under_way -= 1
        return self.step.exception()


@dataclass
class Engine:
    """The engine core with its executor, stepped by hand."""

    core: EngineCore
    channel: MemoryChannel
    scheduler: Scheduler
    executor: WatchedExecutor
    num_added: int = 0
    most_steps_ahead: int = 0
    """Steps that were under way at once, besides the one being planned."""
    sequences: dict[str, list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)
    """Prompt and seed of each request's."""

    def add(
        self,
        request_id: str,
        prompt: list[int],
        output: Sequence[int] = (),
        *,
        seeds: Sequence[int] = (1,),
        outputs: Sequence[Sequence[int]] | None = None,
        beam: BeamSearch | None = None,
        kv_transfer_params: KvTransferParams | None = None,
        cache_salt: str | None = None,
        grammar: str | None = None,
        pooling: Pooling | None = None,
        **sampling: Any,
    ) -> None:
        """A sequence for each seed; `output`: what another engine has generated already, of all of them, or `outputs`,
        of each."""
        self.num_added += 1
        self.sequences[request_id] = [(tuple(prompt), seed) for seed in seeds]
        self.channel.waiting.append(
            AddRequest(
                request_id=request_id,
                api_index=0,
                spec=RequestSpec(
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(
                        **({"max_tokens": NUM_NEW_TOKENS, "seed": 0, "temperature": 0.0} | sampling)
                    ),
                    beam=beam,
                    kv_transfer_params=kv_transfer_params,
                    cache_salt=cache_salt,
                    grammar=grammar,
                    pooling=pooling,
                ),
                sequences=[
                    SequenceStart(index=index, seed=seed, output_token_ids=list(own))
                    for index, (seed, own) in enumerate(zip(seeds, outputs or [output] * len(seeds), strict=True))
                ],
                arrival_time=float(self.num_added),
            )
        )

    def abort(self, *request_ids: str) -> None:
        self.channel.waiting.append(AbortRequests(aborts=[Abort(request_id) for request_id in request_ids]))

    def step_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(5_000):
            if is_done():
                return
            self.core.step()
            self.most_steps_ahead = max(self.most_steps_ahead, self.executor.num_under_way)
        raise AssertionError("the engine did not finish in 5,000 steps")

    def finish(self, *request_ids: str) -> Generated:
        """Step until all of these have ended."""
        self.step_until(lambda: all(self._is_finished(request_id) for request_id in request_ids))
        assert self.channel.stats is not None
        return Generated(self.channel.outputs, self.channel.stats)

    @property
    def num_blocks_used(self) -> int:
        return self.scheduler.stats(0, 0.0).num_blocks_used

    @property
    def is_idle(self) -> bool:
        return not self.executor.num_under_way and not self.scheduler.has_work

    def was_preempted(self, request_id: str) -> bool:
        """Whether one of its sequences was admitted again; no other request may have both prompt and seed in common."""
        return any(self.executor.num_admitted[sequence] > 1 for sequence in self.sequences[request_id])

    def _is_finished(self, request_id: str) -> bool:
        outputs = self.channel.outputs.get(request_id)
        return bool(outputs) and outputs[-1].finish_reason is not None


class ByteTable:
    """The first 256 tokens are bytes, the others special."""

    special_ids = frozenset(range(256, VOCAB_SIZE))
    vocab_size = VOCAB_SIZE

    def token(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def byte_vocabulary(vocab_size: int) -> Vocabulary:
    return Vocabulary(ByteTable(), vocab_size)


EngineFactory = Callable[..., Engine]
TransfersFactory = Callable[[Worker, Scheduler, threading.Event], KvTransfers]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Dtype], Path]:
    """Makes an architecture's model when first asked for."""

    @functools.cache
    def of(architecture: str, dtype: Dtype) -> Path:
        folder = tmp_path_factory.mktemp(f"{architecture}-{dtype}")
        if dtype == "float32":
            model = _random_model(architecture)
        else:
            exact = of(architecture, "float32")
            model = getattr(transformers, architecture).from_pretrained(exact, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        return folder

    return of


@pytest.fixture(scope="session")
def reference(random_model: Callable[[str, Dtype], Path]) -> Callable[[str], Reference]:
    """Makes an architecture's outputs when first asked for."""

    @functools.cache
    def of(architecture: str, dtype: Dtype = "float32") -> Reference:
        folder = random_model(architecture, dtype)
        if dtype != "float32":
            return said_alone(folder, of(architecture).prompts)
        return _run_reference(getattr(transformers, architecture).from_pretrained(folder).eval(), folder)

    return of


@pytest.fixture
def features(request: pytest.FixtureRequest) -> Features:
    """Indirect parameter: names of the features that are on."""
    return Features(**dict.fromkeys(request.param, True))


@pytest.fixture
def start_engine() -> Iterator[EngineFactory]:
    with starting_engines() as start:
        yield start


@contextmanager
def starting_engines() -> Iterator[EngineFactory]:
    executors: list[Executor] = []

    def start(
        folder: Path,
        features: Features = PLAIN,
        depth: FixedDepth | None = None,
        make_transfers: TransfersFactory | None = None,
        kv_cache_dtype: Any = "auto",
        platform: Platform | None = None,
        **execution: Any,
    ) -> Engine:
        worker = _load(folder, kv_cache_dtype, platform, **execution)
        executors.append(Executor(worker.runner))
        own_transfers = None if make_transfers is None else partial(make_transfers, worker)
        depth = depth or draft_depth(execution.get("speculative_config"), MAX_NUM_SEQS)
        return engine_over(executors[-1], worker.description, features, depth, make_transfers=own_transfers)

    try:
        yield start
    finally:
        for executor in executors:
            executor.close()


def _load(folder: Path, kv_cache_dtype: Any = "auto", platform: Platform | None = None, **execution: Any) -> Worker:
    return load_worker(
        ModelConfig(model=str(folder), max_model_len=MAX_MODEL_LEN, device="cpu"),
        CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype),
        ExecutionConfig(num_threads=1, **execution),
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
        proposer_of(ExecutionConfig(**execution)),
        platform=platform,
        make_vocabulary=byte_vocabulary,
    )


def said_alone(folder: Path, prompts: list[list[int]]) -> Reference:
    """What the plain engine says to each prompt while it serves no other."""
    worker = _load(folder)
    executor, reference = Executor(worker.runner), Reference(folder, prompts, [], [], "bfloat16")
    engine = engine_over(executor, worker.description, PLAIN, None)
    all_tokens = worker.description.vocab_size
    for number, prompt in enumerate(prompts):
        name = str(number)
        engine.add(name, prompt, logprobs=all_tokens, prompt_logprobs=all_tokens)
        generated = engine.finish(name)
        reference.outputs.append(generated.token_ids(name))
        entries = [*generated.outputs[name][0].prompt_logprobs[1:], *generated.logprobs(name)]  # none of the first
        token_ids = torch.tensor([entry.token_ids[1:] for entry in entries])
        logprobs = torch.tensor([entry.logprobs[1:] for entry in entries])
        reference.logprobs.append(torch.empty_like(logprobs).scatter_(1, token_ids, logprobs))
    executor.close()
    return reference


def engine_over(
    executor: StepExecutor,
    rank: RankDescription,
    features: Features,
    depth: Any,
    num_stages: int = 1,
    make_transfers: Callable[[Scheduler, threading.Event], KvTransfers] | None = None,
) -> Engine:
    """An engine whose steps are computed by whatever stands behind `executor`; no other may be using it."""
    channel = MemoryChannel()
    scheduler = make_scheduler(
        SchedulerLimits(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=24 if features.chunked else MAX_NUM_BATCHED_TOKENS,
            max_model_len=rank.max_model_len,
            enable_chunked_prefill=features.chunked,
            num_stages=num_stages,
        ),
        policy="fcfs",
        num_blocks=_few_blocks(rank) if features.few_blocks else rank.num_blocks,
        block_size=BLOCK_SIZE,
        groups=rank.layout.groups,
        enable_prefix_caching=features.prefix_cache,
        depth=depth,
    )
    steps_ahead = max(num_stages - 1, 3 if features.three_steps_ahead else int(features.one_step_ahead))
    transfers = None if make_transfers is None else make_transfers(scheduler, channel.wake)
    channel.may_sleep = transfers is not None
    watched = WatchedExecutor(executor)
    observers = [] if depth is None else [depth.observe_step]
    core = EngineCore(watched, channel, scheduler, steps_ahead=steps_ahead, observers=observers, transfers=transfers)
    return Engine(core, channel, scheduler, watched)


def _few_blocks(rank: RankDescription) -> int:
    """Enough for one sequence of the whole context, and a little more where blocks are not freed behind a window."""
    return sum(MAX_MODEL_LEN // BLOCK_SIZE + (3 if group.reach.is_full else 0) for group in rank.layout.groups)


def _random_model(architecture: str) -> Any:
    config_class, options = ARCHITECTURES[architecture]
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**(SHAPE | options))
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases start as constants
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "o_proj" in name or "down_proj" in name:  # else models with tied embeddings repeat the last token
                parameter.mul_(2.0)
            if "Gemma" in architecture and "post_" in name:
                parameter.add_(10.0)
    return model


def _run_reference(model: Any, folder: Path) -> Reference:
    """Two prompts each of 3, 33 and 57 tokens; the longest share 40 with each other."""
    generator = torch.Generator().manual_seed(3)
    reference = Reference(folder, [], [], [])
    for length, num_shared in ((3, 0), (33, 0), (57, 40)):
        prompts = torch.randint(320, (NUM_CANDIDATES, 2, length), generator=generator)
        prompts[:, 1, :num_shared] = prompts[:, 0, :num_shared]
        outputs, logprobs, is_clear = _greedy(model, prompts.flatten(0, 1))
        clear = is_clear.view(-1, 2).all(1).nonzero().flatten().tolist()
        assert clear, f"no two prompts of {length} tokens give a clear reference"
        for row in (2 * clear[0], 2 * clear[0] + 1):
            reference.prompts.append(prompts.flatten(0, 1)[row].tolist())
            reference.outputs.append(outputs[row])
            reference.logprobs.append(logprobs[row])
    return reference


@torch.inference_mode()
def _greedy(model: Any, prompts: torch.Tensor) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Outputs and log-probabilities of equally long prompts, and which of them are varied and leave nothing to
    rounding."""
    tokens = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    outputs = tokens[:, prompts.shape[1] :].tolist()
    top_k = getattr(model.config, "num_experts_per_tok", None)
    output = model(tokens) if top_k is None else model(tokens, output_router_logits=True)
    routers = () if top_k is None else output.router_logits
    margins = _margins(output.logits[:, prompts.shape[1] - 1 :], 1)
    for router in routers:
        margins = margins.minimum(_margins(router.view(*tokens.shape, -1), top_k))
    is_varied = torch.tensor([len(set(output)) > NUM_NEW_TOKENS // 4 for output in outputs])
    return outputs, output.logits.log_softmax(-1), is_varied & (margins > SMALLEST_MARGIN)


def _margins(logits: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Of each text the smallest."""
    best = logits.topk(num_chosen + 1).values
    return (best[..., -2] - best[..., -1]).amin(1)
