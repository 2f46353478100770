"""What others must know of a rank that is ready: nothing that lies on its device."""

from dataclasses import dataclass

from kvasir_runtime.kv_cache.spec import KvLayout, KvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescription:
    layout: KvLayout
    kv_specs: tuple[KvSpec, ...]
    """Of all that this rank's layers keep, in the order of their places in the layout."""
    num_blocks: int
    max_model_len: int
    max_model_len_cut_from: int | None = None
    """What it would be with more memory for the KV cache; None: it was not cut."""
    max_num_batched_tokens: int
    vocab_size: int
    attention_backend: str
    device: str
    """As torch spells it: cpu, cuda, cuda:1."""
    startup_seconds: dict[str, float]
    """Phase -> seconds."""
    computes_whole_prompts: bool = False
    """In one step, and nothing of them is kept."""

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu"
