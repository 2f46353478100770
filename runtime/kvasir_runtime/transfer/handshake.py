"""Whether KV of another engine means the same here: every respect in which it might not, by name."""

from collections.abc import Sequence
from itertools import groupby

from kvasir_runtime.kv_cache.spec import KvGroup, KvLayout, KvSpec
from kvasir_runtime.transfer.messages import Identity

HASH_RULE = "sha256/16 of parent, uint32le tokens, keys"
"""kv_cache/blocks.py, in short."""
_LABELS = {"model": "model digest", "dtype": "KV dtype", "block_size": "block size", "kv_layout": "KV layout"}


def identity(
    model_digest: str, revision: str, layout: KvLayout, stages: Sequence[Sequence[KvSpec]], tensor_size: int
) -> Identity:
    """Of an engine whose pipeline stages have `tensor_size` ranks each, of which one keeps the specs in `stages`: heads
    are counted over all ranks, since they may be split differently on the other side. `layout`: any stage's."""
    specs = [spec for stage in stages for spec in stage]
    return Identity(
        model=model_digest,
        revision=revision,
        dtype=", ".join(sorted({spec.dtype for spec in specs})),
        block_size=layout.block_size,
        kv_layout=_described(layout, specs, tensor_size),
        pipeline_cut=[len(stage) for stage in stages],
        hash_rule=HASH_RULE,
    )


def refusal(ours: Identity, theirs: Identity) -> str | None:
    """Why nothing can be exchanged; None: all is equal."""
    names = [name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)]
    if not names:
        return None
    differences = "; ".join(
        f"{_LABELS.get(name, name.replace('_', ' '))} is {getattr(theirs, name)!r} there and {getattr(ours, name)!r} "
        "here"
        for name in names
    )
    return f"its KV cannot be used here: {differences}"


def _described(layout: KvLayout, specs: Sequence[KvSpec], tensor_size: int) -> str:
    runs = groupby(_layer(spec, tensor_size) for spec in specs)
    layers = ", ".join(f"{len(list(run))} x {layer}" for layer, run in runs)
    return f"[block, layer, key/value, token, head, dim]: {layers}; groups {_groups(layout.groups)}"


def _layer(spec: KvSpec, tensor_size: int) -> str:
    kind = spec.reach.kind if spec.value_dim else "latent"
    dims = "+".join(map(str, dict.fromkeys(spec.head_dims)))
    size = "" if spec.reach.is_full else f" {spec.reach.kind} {spec.reach.size}"
    scales = f" scales {spec.scale_bytes}" if spec.scale_bytes else ""
    return f"{kind} {spec.num_kv_heads * tensor_size // spec.num_copies} heads of {dims}{size}{scales}"


def _groups(groups: Sequence[KvGroup]) -> str:
    return "/".join(str(len(group.specs)) for group in groups)
