"""What the trainers of draft heads share: the frozen target, the text, the loop, and how acceptance is counted.

A head drafts at each place of a row. Its drafts are scored against what the row goes on with, so text that the target
wrote itself gives the acceptance of greedy decoding.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train import SEED, Budget, build_optimizers, set_learning_rate
from transformers import LlamaForCausalLM
from transformers.utils import logging

ROWS_IN_STEP = 4
REPORTED_ROWS = 16
REPORT_SECONDS = 240


@dataclass(frozen=True)
class Target:
    """The frozen model that the head drafts for."""

    model: LlamaForCausalLM

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Residual streams entering each layer, then the last norm's output: each float32 [num_rows, ROW, hidden]."""
        output = self.model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        return tuple(hidden.float() for hidden in output.hidden_states)

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.model.model.embed_tokens.weight.float())

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.model.lm_head.weight.float())


@dataclass(frozen=True)
class Text:
    """What continue_text.py wrote; each [num_rows, ROW]."""

    continued: Tensor
    corpus: Tensor
    held_out: Tensor

    def draw(self, generator: torch.Generator) -> Tensor:
        """[ROWS_IN_STEP, ROW]: half of it written by the target, half by the corpus."""
        half = ROWS_IN_STEP // 2
        picks = [torch.randint(len(rows), (half,), generator=generator) for rows in (self.continued, self.corpus)]
        return torch.cat([self.continued[picks[0]], self.corpus[picks[1]]])


def parse_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="written by continue_text.py")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float)
    return parser


def load_target(folder: Path) -> Target:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return Target(model.requires_grad_(False))


def load_text(args: argparse.Namespace) -> Text:
    return Text(**torch.load(args.text))


def train(
    head: nn.Module,
    text: Text,
    loss_of: Callable[[Tensor], Tensor],
    matches: Callable[[Tensor], Tensor],
    args: argparse.Namespace,
    learning_rate: float,
) -> None:
    """Train until the budget is spent. `loss_of` takes rows of ids, `matches` too (see `acceptance`)."""
    print(f"{sum(weight.numel() for weight in head.parameters())} parameters", flush=True)
    optimizers = build_optimizers(head, learning_rate)
    generator = torch.Generator().manual_seed(SEED)
    budget = Budget(args.steps, args.minutes * 60 if args.minutes else None)
    started = reported = time.monotonic()
    step, average = 0, float("nan")
    while (spent := budget.spent(step, started)) < 1:
        set_learning_rate(optimizers, spent)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(text.draw(generator))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        step += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            some = text.held_out[:: len(text.held_out) // REPORTED_ROWS]
            print(f"step {step} loss {average:.3f} {acceptance(some, matches)}", flush=True)
            reported = time.monotonic()
    print(f"step {step} loss {average:.3f} {acceptance(text.held_out, matches)}", flush=True)


@torch.no_grad()
def acceptance(held_out: Tensor, matches: Callable[[Tensor], Tensor]) -> str:
    """Per draft: how often it holds where those before it did; then the tokens of a step, the target's own included.

    `matches` gives, for rows of ids, bool [num_rows, num_places, num_drafts]: whether draft j of a place is the row's
    token, for the places in the target's own continuation.
    """
    held = torch.cat([matches(rows).flatten(0, 1) for rows in held_out.split(ROWS_IN_STEP)]).float()
    chains = held.cumprod(-1).mean(0)
    before = torch.cat([torch.ones(1), chains[:-1]])
    each = " ".join(f"{share:.2f}" for share in (chains / before).tolist())
    return f"acceptance {each}, {1 + chains.sum().item():.2f} tokens a step"


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """bfloat16 weights and config.json, in the layout that public heads have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    halves = {
        name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
