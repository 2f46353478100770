"""The flags of `kvasir-runtime serve`, by which `engine.args` are checked; made by operator/engine_flags.py."""

from typing import Final

_FLAGS = """
--allow-credentials --allowed-headers --allowed-methods --allowed-origins --api-key --api-server-count
--async-scheduling --attention-backend --batch-invariant --block-size --chat-template --collective-backend --convert
--data-parallel-size --device --download-dir --drop-client-header --dtype --enable-auto-tool-choice
--enable-chunked-prefill --enable-expert-parallel --enable-prefix-caching --enable-tokenizer-info-endpoint
--gpu-memory-utilization --help --hf-overrides --host --kv-cache-dtype --kv-cache-memory-bytes --kv-events-config
--kv-transfer-config --kv-transfer-trust-clients --linear-path --log-format --log-level --master-addr --master-port
--max-body-bytes --max-connections --max-connections-per-peer --max-logprobs --max-model-len --max-n
--max-num-batched-tokens --max-num-seqs --max-request-sequences --max-sequences-in-flight --max-step-ms --nnodes
--no-allow-credentials --no-async-scheduling --no-batch-invariant --no-drop-client-header --no-enable-auto-tool-choice
--no-enable-chunked-prefill --no-enable-expert-parallel --no-enable-prefix-caching --no-enable-tokenizer-info-endpoint
--no-kv-transfer-trust-clients --node-rank --num-gpu-blocks-override --num-threads --pipeline-layer-partition
--pipeline-parallel-size --pooler-config --port --priority-preemption-threshold --reasoning-parser
--response-store-bytes --runner --scheduling-policy --seed --served-model-name --shutdown-delay --shutdown-timeout
--speculative-config --stall-seconds --steps-ahead --structured-outputs-config --tensor-parallel-size --tokenizer
--tool-call-parser
"""
ENGINE_FLAGS: Final = frozenset(_FLAGS.split())
