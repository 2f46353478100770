"""Train Medusa heads on a frozen model (Cai et al. 2024, "Medusa: simple LLM inference acceleration framework").

    python continue_text.py kvasir-python-7m text.pt --minutes 5
    python train_medusa.py kvasir-python-7m kvasir-python-7m-medusa --text text.pt --minutes 10

Head i guesses the token i + 2 places on from the target's last hidden state. The heads share the target's lm head, so
only their residual blocks are saved.
"""

import torch
from continue_text import PROMPT
from draft_heads import Target, load_target, load_text, parse_arguments, save_head, train
from torch import Tensor, nn
from torch.nn import functional

NUM_HEADS = 4
NUM_LAYERS = 2
LEARNING_RATE = 3e-3


class ResidualBlock(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)  # the head starts as the target's own next token

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = [target]  # in a list: its weights are not the heads'
        self.heads = nn.ModuleList(
            nn.Sequential(*[ResidualBlock(target.hidden_size) for _ in range(NUM_LAYERS)]) for _ in range(NUM_HEADS)
        )

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Logits of each head at the places whose last head still has a token to guess."""
        target = self.target[0]
        hidden = target.read(ids)[-1][:, : -NUM_HEADS - 1]
        return [target.logits(head(hidden)) for head in self.heads]

    def loss(self, ids: Tensor) -> Tensor:
        """Heads further on are less sure, and weigh less."""
        losses = [
            0.8**index * functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
            for index, (logits, wanted) in enumerate(zip(self(ids), _continuations(ids), strict=True))
        ]
        return torch.stack(losses).sum()

    def matches(self, ids: Tensor) -> Tensor:
        drafts = torch.stack([logits.argmax(-1) for logits in self(ids)], -1)
        return (drafts == torch.stack(_continuations(ids), -1))[:, PROMPT:]

    def tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("heads."): weight for name, weight in self.state_dict().items()}


def _continuations(ids: Tensor) -> list[Tensor]:
    """For each head the tokens it should guess, place by place."""
    num_places = ids.shape[1] - NUM_HEADS - 1
    return [ids[:, index + 2 : index + 2 + num_places] for index in range(NUM_HEADS)]


def main() -> None:
    args = parse_arguments(__doc__).parse_args()
    target = load_target(args.target)
    text = load_text(args)
    torch.manual_seed(0)
    heads = MedusaHeads(target)
    train(heads, text, heads.loss, heads.matches, args, LEARNING_RATE)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.model.config.vocab_size,
        "medusa_num_heads": NUM_HEADS,
        "medusa_num_layers": NUM_LAYERS,
    }
    save_head(args.folder, config, heads.tensors())


if __name__ == "__main__":
    main()
