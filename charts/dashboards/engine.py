"""One engine or several: what they do, how fast, and what they wait for."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import (
    BYTES_PER_SECOND,
    COUNT,
    EVENTS_PER_SECOND,
    PER_SECOND,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    Limits,
    Query,
    graph,
    number,
)
from charts.dashboards.promql import ENGINES, ratio
from charts.dashboards.variables import ENGINES as CHOICES

_TTFT, _ITL = "kvasir_time_to_first_token_seconds", "kvasir_inter_token_latency_seconds"
_STEPS, _GENERATED = "kvasir_engine_steps_total", "kvasir_generation_tokens_total"
_PROGRESS = ENGINES.of("kvasir_engine_last_progress_timestamp_seconds")
_IN_FLIGHT = ENGINES.of("kvasir_http_requests_in_flight")

_NUMBERS = Section(
    "Now",
    [
        number(
            "Engines", COUNT,
            "Engines that Prometheus reaches. None: the service is at zero, or its pods are not scraped.",
            f"count({_IN_FLIGHT})",
        ),
        number(
            "Running", COUNT, "Requests in batches. At maxNumSeqs times the engines no more fit in: further ones wait.",
            ENGINES.sum("kvasir_num_requests_running"),
        ),
        number(
            "Waiting", COUNT, "Requests without a place in a batch. Lasting: add replicas, or memory for the KV cache.",
            ENGINES.sum("kvasir_num_requests_waiting"), Limits(10, 100),
        ),
        number(
            "Longest without a step", SECONDS,
            "Of engines that have requests: seconds since the last finished step. Above 60 s KvasirEngineStalled "
            "fires and the kubelet restarts the engine; its log has the device's errors.",
            f"max((timestamp({_PROGRESS}) - {_PROGRESS}) * on (namespace, pod) ({_IN_FLIGHT} > bool 0))",
            Limits(10, 60),
        ),
        number(
            "Generated tokens", TOKENS_PER_SECOND,
            "Of all chosen engines. Compare with what benchmarks gave for this model and device.",
            ENGINES.rate(_GENERATED),
        ),
        number(
            "Ended by errors", PER_SECOND,
            "Sequences a second that the engine could not finish. Its log names the error.",
            ENGINES.rate("kvasir_requests_finished_total", "", 'finish_reason="error"'), Limits(0.01, 0.1),
        ),
    ],
)  # fmt: skip

_REQUESTS = Section(
    "Requests",
    [
        graph(
            "Running", COUNT,
            "Requests in the batch of each engine. Uneven for long: see Picks of the Router dashboard.",
            Query(ENGINES.sum("kvasir_num_requests_running", "pod"), "{{pod}}"),
        ),
        graph(
            "Waiting", COUNT,
            "Requests that wait for a place in the batch, and those held for something else, such as KV that another "
            "engine sends. Waiting while the KV cache has room: raise maxNumSeqs.",
            Query(ENGINES.sum("kvasir_num_requests_waiting", "pod"), "{{pod}} waiting"),
            Query(ENGINES.sum("kvasir_num_requests_held", "pod"), "{{pod}} held"),
        ),
        graph(
            "Sequences that ended", PER_SECOND,
            "By reason. `abort`: the client went away, or another engine went on with the stream; many of them point "
            "to clients that give up waiting. `error`: see the log.",
            Query(ENGINES.rate("kvasir_requests_finished_total", "finish_reason"), "{{finish_reason}}"),
            is_stacked=True,
        ),
        graph(
            "HTTP requests", COUNT,
            "Being answered now, by engine. They may exceed running and waiting requests by those that are tokenised "
            "or read slowly.",
            Query(ENGINES.sum("kvasir_http_requests_in_flight", "pod"), "{{pod}}"),
        ),
        graph(
            "Prompt tokens still to compute", TOKENS,
            "By engine, neither cached nor computed. Over the prefill speed below it is the wait for a first token.",
            Query(ENGINES.sum("kvasir_uncached_tokens", "pod"), "{{pod}}"),
        ),
        graph(
            "Preemptions", PER_SECOND,
            "Requests set back for want of KV blocks, by engine: they are computed again. Add replicas or KV memory, "
            "or lower maxNumSeqs.",
            Query(ENGINES.rate("kvasir_num_preemptions_total", "pod, mode"), "{{pod}} {{mode}}"),
        ),
    ],
)  # fmt: skip

_LATENCY = Section(
    "Latency",
    [
        graph(
            "Time to first token", SECONDS,
            "From arrival at the engine. p50 high: too few engines for the prompts. p99 alone: long prompts hold "
            "others up, lower maxNumBatchedTokens.",
            Query(ENGINES.quantile(0.5, _TTFT), "p50"),
            Query(ENGINES.quantile(0.9, _TTFT), "p90"),
            Query(ENGINES.quantile(0.99, _TTFT), "p99"), when_empty="no requests",
        ),
        graph(
            "Time to first token by engine, p90", SECONDS,
            "One engine above the others: it has more work, or its device is slower. Compare Running and Steps.",
            Query(ENGINES.quantile(0.9, _TTFT, "pod"), "{{pod}}"), when_empty="no requests",
        ),
        graph(
            "Time between tokens", SECONDS,
            "A step's time, and more where a sequence was preempted. p99 far above p50: prefills in the same steps, "
            "lower maxNumBatchedTokens or part prefill from decode.",
            Query(ENGINES.quantile(0.5, _ITL), "p50"),
            Query(ENGINES.quantile(0.9, _ITL), "p90"),
            Query(ENGINES.quantile(0.99, _ITL), "p99"), when_empty="no requests",
        ),
    ],
)  # fmt: skip

_WORK = Section(
    "Work",
    [
        graph(
            "Generated tokens", TOKENS_PER_SECOND,
            "By engine. Flat while more requests run: the device is at its limit.",
            Query(ENGINES.rate(_GENERATED, "pod"), "{{pod}}"), is_stacked=True,
        ),
        graph(
            "Prompt tokens", TOKENS_PER_SECOND, "Of requests that began, cached ones included, by engine.",
            Query(ENGINES.rate("kvasir_prompt_tokens_total", "pod"), "{{pod}}"), is_stacked=True,
        ),
        graph(
            "Prefill speed", TOKENS_PER_SECOND,
            "Prompt tokens that an engine computes a second while it computes prompts, as it measures itself; routers "
            "and the autoscaler reckon with it. One engine below the others: look at its node.",
            Query(ENGINES.max("kvasir_prefill_tokens_per_second", "pod"), "{{pod}}"), when_empty="no prompts yet",
        ),
        graph(
            "Steps", EVENTS_PER_SECOND, "By engine. No steps while requests run: it stalls.",
            Query(ENGINES.rate(_STEPS, "pod"), "{{pod}}"),
        ),
        graph(
            "Tokens a step", COUNT,
            "Generated tokens over steps: how full batches are. Near 1 with many waiting: the KV cache is too small "
            "for them.",
            Query(ratio(ENGINES.rate(_GENERATED, "pod"), ENGINES.rate(_STEPS, "pod")), "{{pod}}"),
            when_empty="no steps",
        ),
        graph(
            "Start", SECONDS,
            "Seconds of each phase of the last start, of the slowest engine: the wake time of a service at zero, and "
            "a rollout's. load_weights high: a faster volume or a cache on the node.",
            Query(ENGINES.max("kvasir_engine_startup_seconds", "phase"), "{{phase}}"),
        ),
    ],
)  # fmt: skip

_RANKS = Section(
    "Ranks",
    [
        graph(
            "Collectives", BYTES_PER_SECOND,
            "Bytes that ranks hand to each other, by group and operation, of engines with several. Compare with what "
            "the link between their devices carries; near it, a smaller tensor degree is faster.",
            Query(ENGINES.rate("kvasir_parallel_collective_bytes_total", "group, op"), "{{group}} {{op}}"),
            when_empty="no engine with several ranks",
        ),
        graph(
            "Calls of collectives", EVENTS_PER_SECOND,
            "By group and operation. Many calls of few bytes: latency counts, not bandwidth.",
            Query(ENGINES.rate("kvasir_parallel_collectives_total", "group, op"), "{{group}} {{op}}"),
            when_empty="no engine with several ranks",
        ),
        graph(
            "Requests by data-parallel rank", COUNT,
            "Of engines with copies of the model. Uneven for long: prompts of one prefix go to one rank.",
            Query(
                ENGINES.sum("kvasir_data_parallel_num_requests", "pod, data_parallel_rank, state"),
                "{{pod}} {{data_parallel_rank}} {{state}}",
            ), when_empty="no data-parallel engine",
        ),
        graph(
            "KV cache by data-parallel rank", SHARE, "The fullest rank decides when requests wait.",
            Query(
                ENGINES.max("kvasir_data_parallel_kv_cache_usage_ratio", "pod, data_parallel_rank"),
                "{{pod}} {{data_parallel_rank}}",
            ), limits=Limits(0.8, 0.95), highest=1, when_empty="no data-parallel engine",
        ),
        graph(
            "Steps by data-parallel rank", EVENTS_PER_SECOND, "A rank without steps while it has requests stalls.",
            Query(
                ENGINES.rate("kvasir_data_parallel_engine_steps_total", "pod, data_parallel_rank"),
                "{{pod}} {{data_parallel_rank}}",
            ), when_empty="no data-parallel engine",
        ),
    ],
)  # fmt: skip

ENGINE = Board(
    "engine", "Engine", "What engines do, how fast, and what they wait for.",
    CHOICES, [_NUMBERS, _REQUESTS, _LATENCY, _WORK, _RANKS],
)  # fmt: skip
