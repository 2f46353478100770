"""Train an EAGLE head on a frozen model (Li et al. 2024 and 2025: EAGLE, EAGLE-2, EAGLE-3).

    python continue_text.py kvasir-python-7m text.pt --minutes 5
    python train_eagle.py kvasir-python-7m kvasir-python-7m-eagle --text text.pt --minutes 10
    python train_eagle.py --eagle3 kvasir-python-7m kvasir-python-7m-eagle3 --text text.pt --minutes 10

At place p the head sees the target's hidden state of p and the token at p + 1, and guesses the token at p + 2. Both
kinds are trained over chains of NUM_STEPS drafts that feed on the head's own states, as they are used (EAGLE-3's
training-time test).
"""

from collections import Counter

import torch
from continue_text import PROMPT
from draft_heads import Target, Text, load_target, load_text, parse_arguments, save_head, train
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

NUM_STEPS = 4
CAPTURED_LAYERS = (1, 3, 5)
DRAFT_VOCABULARY = 2048
LEARNING_RATE = 3e-3


class ChainAttention(nn.Module):
    """Attention of draft s of every chain at once: a chain that starts at place b sees the first drafts' keys up to b,
    and of later drafts only its own."""

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """[num_rows, num_chains, hidden]; adds this draft's keys and values to the lists."""
        num_chains, draft = hidden.shape[1], len(keys)
        query, key = self._heads(self.q_proj(hidden)), self._heads(self.k_proj(hidden))
        cos, sin = self.rotary(hidden, torch.arange(draft, draft + num_chains)[None])
        keys.append((key * cos + rotate_half(key) * sin).repeat_interleave(self.groups, 1))
        values.append(self._heads(self.v_proj(hidden)).repeat_interleave(self.groups, 1))
        query = (query * cos + rotate_half(query) * sin) * self.head_dim**-0.5
        future = torch.ones(num_chains, num_chains, dtype=torch.bool).triu(1)
        scores = [(query @ keys[0].transpose(-1, -2)).float().masked_fill(future, float("-inf"))]
        scores += [(query * key).float().sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        attended = weights[..., :num_chains] @ values[0].float()
        for index, value in enumerate(values[1:]):
            attended = attended + weights[..., num_chains + index, None] * value
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class EagleLayer(nn.Module):
    """A decoder layer; EAGLE-3's takes the embedding beside the hidden state, EAGLE's has no norm before attention."""

    def __init__(self, config: LlamaConfig, is_eagle3: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        if is_eagle3:
            self.hidden_norm = LlamaRMSNorm(size, eps)
            self.input_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = ChainAttention(config, 2 * size if is_eagle3 else size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, embedded: Tensor | None, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        entered = hidden
        if embedded is not None:
            entered = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(entered, keys, values)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """Tokens are guessed from the target's lm head."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = [target]  # in a list: its weights are not the head's
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(target.model.config, is_eagle3=False)])

    def chains(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(hidden states, logits) of each draft, for chains that start at every place."""
        target, num_chains = self.target[0], ids.shape[1] - NUM_STEPS - 1
        embedded = target.embed(ids)
        hidden = target.read(ids)[-1][:, :num_chains]
        drafts, keys, values = [], [], []
        for draft in range(NUM_STEPS):
            token = embedded[:, draft + 1 : draft + 1 + num_chains]
            hidden = self.layers[0](self.fc(torch.cat([token, hidden], -1)), None, keys, values)
            drafts.append((hidden, target.logits(hidden)))
        return drafts

    def loss(self, ids: Tensor) -> Tensor:
        """The target's own distribution and, for EAGLE, its hidden states are what each draft should give."""
        target, num_chains = self.target[0], ids.shape[1] - NUM_STEPS - 1
        wanted_hidden = target.read(ids)[-1]
        losses = []
        for draft, (hidden, logits) in enumerate(self.chains(ids)):
            goal = wanted_hidden[:, draft + 1 : draft + 1 + num_chains]
            losses.append(0.8**draft * functional.smooth_l1_loss(hidden, goal))
            losses.append(0.8**draft * cross_entropy(logits, target.logits(goal)))
        return torch.stack(losses).sum()

    def matches(self, ids: Tensor) -> Tensor:
        num_chains = ids.shape[1] - NUM_STEPS - 1
        drafts = torch.stack([self.tokens(logits) for _, logits in self.chains(ids)], -1)
        held = torch.stack([ids[:, draft + 2 : draft + 2 + num_chains] for draft in range(NUM_STEPS)], -1)
        return (drafts == held)[:, PROMPT:]

    def tokens(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.state_dict())


class Eagle3Head(EagleHead):
    """Three layers' states are fused, and an lm head of its own covers the target's commonest tokens."""

    def __init__(self, target: Target, commonest: Tensor) -> None:
        nn.Module.__init__(self)
        self.target = [target]
        size, config = target.hidden_size, target.model.config
        self.register_buffer("draft_to_target", commonest.sort().values)
        self.fc = nn.Linear(len(CAPTURED_LAYERS) * size, size, bias=False)
        self.midlayer = EagleLayer(config, is_eagle3=True)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, DRAFT_VOCABULARY, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.model.lm_head.weight[self.draft_to_target])

    def chains(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        target, num_chains = self.target[0], ids.shape[1] - NUM_STEPS - 1
        embedded, states = target.embed(ids), target.read(ids)
        hidden = self.fc(torch.cat([states[layer] for layer in CAPTURED_LAYERS], -1)[:, :num_chains])
        drafts, keys, values = [], [], []
        for draft in range(NUM_STEPS):
            token = embedded[:, draft + 1 : draft + 1 + num_chains]
            hidden = self.midlayer(hidden, token, keys, values)
            drafts.append((hidden, self.lm_head(self.norm(hidden))))
        return drafts

    def loss(self, ids: Tensor) -> Tensor:
        target, num_chains = self.target[0], ids.shape[1] - NUM_STEPS - 1
        wanted = target.logits(target.read(ids)[-1])[..., self.draft_to_target]
        losses = [
            0.8**draft * cross_entropy(logits, wanted[:, draft + 1 : draft + 1 + num_chains])
            for draft, (_, logits) in enumerate(self.chains(ids))
        ]
        return torch.stack(losses).sum()

    def tokens(self, logits: Tensor) -> Tensor:
        return self.draft_to_target[logits.argmax(-1)]

    def tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.state_dict())
        chosen = tensors.pop("draft_to_target")
        kept = torch.zeros(self.target[0].model.config.vocab_size, dtype=torch.bool)
        kept[chosen] = True
        return tensors | {"d2t": chosen - torch.arange(len(chosen)), "t2d": kept}


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """With the target's whole distribution."""
    return functional.cross_entropy(logits.float().flatten(0, 1), wanted.float().flatten(0, 1).softmax(-1))


def commonest_tokens(text: Text) -> Tensor:
    counts = Counter(text.continued[:, PROMPT:].flatten().tolist())
    return torch.tensor([token for token, _ in counts.most_common(DRAFT_VOCABULARY)])


def config_of(head: EagleHead) -> dict[str, object]:
    base = head.target[0].model.config
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    kept += ("rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters")
    config = {name: getattr(base, name) for name in kept} | {"model_type": "llama", "num_hidden_layers": 1}
    if not isinstance(head, Eagle3Head):
        return {"architectures": ["EagleLlamaForCausalLM"], **config, "bias": False}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **config,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(CAPTURED_LAYERS)},
    }


def main() -> None:
    parser = parse_arguments(__doc__)
    parser.add_argument("--eagle3", action="store_true", help="train an EAGLE-3 head; default: EAGLE-1/2")
    args = parser.parse_args()
    target = load_target(args.target)
    text = load_text(args)
    torch.manual_seed(0)
    head = Eagle3Head(target, commonest_tokens(text)) if args.eagle3 else EagleHead(target)
    train(head, text, head.loss, head.matches, args, LEARNING_RATE)
    save_head(args.folder, config_of(head), head.tensors())


if __name__ == "__main__":
    main()
