"""The engine's command line: `kvasir-runtime serve MODEL` with the manifest's fields as flags."""

import json
from typing import Final

from kvasir_logging import LogFormat
from kvasir_operator.api import labels
from kvasir_operator.api.model import EngineSpec, InferenceService, SpeculativeSpec
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.engine_resources import device
from kvasir_operator.resources.kv_events import engine_kv_events_flags
from kvasir_operator.resources.kv_transfer import kv_transfer_flags
from kvasir_operator.resources.parallel_ranks import parallel_flags

SPECULATIVE_FLAG: Final = "--speculative-config"
# Every address of the machine, IPv6 and IPv4, by one socket.
ANY_ADDRESS: Final = "::"


def engine_command(
    service: InferenceService,
    role: EngineRole,
    model_location: str,
    draft_location: str | None = None,
    log_format: LogFormat = "text",
) -> list[str]:
    """Flags are named as vLLM users type them; the manifest's own `engine.args` come last.

    Only the model's own name is served: aliases are the router's, so a new one restarts no engine.
    `draft_location`: of the model or heads that draft; None for methods that have none.
    """
    return [
        "kvasir-runtime",
        "serve",
        model_location,
        *("--served-model-name", service.model_names[0]),
        *("--host", ANY_ADDRESS),
        *("--port", str(labels.ENGINE_HTTP_PORT)),
        *("--device", device(role)),
        *parallel_flags(service, role),
        *_engine_flags(role.engine),
        *_speculative_flags(role.engine.speculative, draft_location),
        *engine_kv_events_flags(),
        *kv_transfer_flags(role),
        *("--shutdown-timeout", f"{service.spec.rollout.drain_timeout.seconds:g}"),
        *log_flags(log_format),
        *role.engine.args,
    ]


def log_flags(log_format: LogFormat) -> list[str]:
    """None where it is the programs' own default, so that pods are made anew only where their log changes."""
    return [] if log_format == "text" else ["--log-format", log_format]


def _engine_flags(engine: EngineSpec) -> list[str]:
    cache = engine.kv_cache
    flags = {
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--gpu-memory-utilization": engine.memory_utilization,
        "--scheduling-policy": engine.scheduling,
        "--block-size": cache.block_size,
    }
    given = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    return [*given, "--enable-prefix-caching" if cache.prefix_caching else "--no-enable-prefix-caching"]


def _speculative_flags(speculative: SpeculativeSpec | None, draft_location: str | None) -> list[str]:
    if speculative is None:
        return []
    method = "draft_model" if speculative.method == "draftModel" else speculative.method
    model = {} if draft_location is None else {"model": draft_location}
    config = {"method": method, **model, "num_speculative_tokens": speculative.num_tokens}
    return [SPECULATIVE_FLAG, json.dumps(config)]
