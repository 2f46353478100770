"""Checkpoints of real shapes with random weights, for speed only: `llama-100m` and `qwen3-0.6b`, bf16, 32,000 tokens;
`toy` shows that a benchmark runs.

o_proj and down_proj are scaled up, or a tied random model would only repeat its last token. Seeded, so every engine and
every run loads the same bytes. Needs torch, safetensors and tokenizers.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 32_000
END_OF_TEXT = "<|endoftext|>"
RESIDUAL_SCALE = 8.0

_SHARED = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "attention_bias": False,
    "initializer_range": 0.02,
}
CONFIGS = {
    "llama-100m": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048,
        "mlp_bias": False,
    },
    "qwen3-0.6b": _SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
    "toy": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "mlp_bias": False,
    },
}  # fmt: skip


def make_model(name: str, parent: Path) -> Path:
    """Folder of the checkpoint, made if it is not there yet."""
    folder = parent / name
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = CONFIGS[name]
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        save_file(_random_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
        _save_tokenizer(folder)
    return folder


def _random_weights(config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02 * scale).bfloat16()

    weights = {"model.embed_tokens.weight": weight(config["vocab_size"], hidden), "model.norm.weight": _ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": _ones(hidden),
            prefix + "post_attention_layernorm.weight": _ones(hidden),
            prefix + "self_attn.q_proj.weight": weight(query, hidden),
            prefix + "self_attn.k_proj.weight": weight(kv, hidden),
            prefix + "self_attn.v_proj.weight": weight(kv, hidden),
            prefix + "self_attn.o_proj.weight": weight(hidden, query, RESIDUAL_SCALE),
            prefix + "mlp.gate_proj.weight": weight(config["intermediate_size"], hidden),
            prefix + "mlp.up_proj.weight": weight(config["intermediate_size"], hidden),
            prefix + "mlp.down_proj.weight": weight(hidden, config["intermediate_size"], RESIDUAL_SCALE),
        }
        if config["model_type"] == "qwen3":
            weights[prefix + "self_attn.q_norm.weight"] = _ones(head_dim)
            weights[prefix + "self_attn.k_norm.weight"] = _ones(head_dim)
    return weights


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of the right size whose every id is plain ASCII text, so that detokenising is real work."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(33, 127)]
    pairs = [(a, b) for a in letters for b in letters]
    triples = [(a + b, c) for a, b in pairs for c in letters]
    merges = (pairs + triples)[: VOCAB_SIZE - len(alphabet) - 1]
    tokens = alphabet + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
