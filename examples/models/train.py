"""Train an example model on the standard library and save it as a Hugging Face folder.

    python train.py target kvasir-python-7m --minutes 30
    python train.py target kvasir-python-7m --start kvasir-python-7m --minutes 10      (go on from there)
    python train.py draft kvasir-python-700k --teacher kvasir-python-7m --minutes 6

The folder is complete from the first second (untrained) and is written again at each report. `--steps` in place of
`--minutes` makes a run repeatable; a run by the clock depends on the machine.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Conversation, Corpus, gather
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from vocabulary import END_OF_TEXT_ID, TURN_END_ID, VOCABULARY_SIZE, train_tokenizer

MAX_POSITION = 2048
CONTEXT = 512
CHAT_ROWS_IN_FOUR = 2
SEED = 20


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    learning_rate: float


SHAPES = {
    "target": Shape(256, 1024, 6, num_heads=8, num_kv_heads=4, learning_rate=3e-3),
    "draft": Shape(96, 256, 3, num_heads=4, num_kv_heads=2, learning_rate=6e-3),
}


@dataclass(frozen=True)
class Rows:
    """Token ids of the training text: a code row is any window of the stream, a chat row is whole conversations."""

    code: torch.Tensor  # [num_tokens]
    chat: torch.Tensor  # [num_rows, CONTEXT]
    held_out: torch.Tensor  # [num_rows, CONTEXT]
    held_out_chat: torch.Tensor  # [num_rows, CONTEXT]

    def draw(self, num_rows: int, generator: torch.Generator) -> torch.Tensor:
        """Return [num_rows, CONTEXT] with CHAT_ROWS_IN_FOUR of every four rows from the conversations."""
        starts = torch.randint(len(self.code) - CONTEXT, (num_rows,), generator=generator)
        picks = torch.randint(len(self.chat), (num_rows,), generator=generator)
        return torch.stack(
            [
                self.chat[pick] if index % 4 < CHAT_ROWS_IN_FOUR else self.code[start : start + CONTEXT]
                for index, (start, pick) in enumerate(zip(starts.tolist(), picks.tolist(), strict=True))
            ]
        )


@dataclass(frozen=True)
class Budget:
    """A run ends after so many steps or so many seconds; the other one is None."""

    steps: int | None
    seconds: float | None

    def spent(self, step: int, started: float) -> float:
        return step / self.steps if self.steps else (time.monotonic() - started) / (self.seconds or 1.0)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(SEED)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    corpus = gather(SEED)
    tokenizer = tokenizer_for(args.start or args.teacher, corpus)
    rows = encode(corpus, tokenizer)
    model = build_model(SHAPES[args.shape], args.start)
    print(f"{model.num_parameters()} parameters, {len(rows.code)} code and {rows.chat.numel()} chat tokens", flush=True)
    teacher = LlamaForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16) if args.teacher else None
    save_tokenizer(tokenizer, args.start or args.teacher, args.folder)
    save(model, args.folder)
    budget = Budget(args.steps, args.minutes * 60 if args.minutes else None)
    train(model, teacher, rows, budget, SHAPES[args.shape].learning_rate, args)
    print(f"held-out perplexity {perplexity(model, rows.held_out):.2f} over {rows.held_out.numel()} tokens")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--teacher", type=Path, help="folder whose tokenizer is taken and whose output is imitated")
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {CONTEXT} tokens in a step")
    parser.add_argument("--report-seconds", type=float, default=300.0)
    parser.add_argument(
        "--start", type=Path, help="folder of a trained model to go on from, on other draws of the text"
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float)
    return parser.parse_args()


def tokenizer_for(model: Path | None, corpus: Corpus) -> PreTrainedTokenizerFast:
    if model is not None:
        return PreTrainedTokenizerFast.from_pretrained(model)  # type: ignore[no-any-return]
    return train_tokenizer(corpus.documents, MAX_POSITION)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, source: Path | None, folder: Path) -> None:
    """Take the files of the model that the tokenizer came from: saving a loaded tokenizer adds fields to them."""
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        tokenizer.save_pretrained(folder)
    elif source.resolve() != folder.resolve():
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(source / name, folder / name)


def encode(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Rows:
    return Rows(
        code=torch.tensor(list(stream(ids_of(corpus.documents, tokenizer)))),
        chat=pack(ids_of(as_texts(corpus.conversations, tokenizer), tokenizer)),
        held_out=windows(list(stream(ids_of(corpus.held_out, tokenizer)))),
        held_out_chat=pack(ids_of(as_texts(corpus.held_out_conversations, tokenizer), tokenizer)),
    )


def as_texts(talks: list[Conversation], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [str(tokenizer.apply_chat_template(talk, tokenize=False)) for talk in talks]


def ids_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]


def stream(documents: list[list[int]]) -> Iterator[int]:
    for ids in documents:
        yield from ids
        yield END_OF_TEXT_ID


def pack(talks: list[list[int]]) -> torch.Tensor:
    """Fill rows with whole conversations, so that each row begins where a served prompt begins."""
    rows: list[list[int]] = [[]]
    for ids in talks:
        if len(ids) >= CONTEXT:
            continue
        if len(rows[-1]) + len(ids) > CONTEXT:
            rows.append([])
        rows[-1] += [*ids, END_OF_TEXT_ID]
    return torch.tensor([(row + [END_OF_TEXT_ID] * CONTEXT)[:CONTEXT] for row in rows])


def windows(ids: list[int]) -> torch.Tensor:
    usable = len(ids) - len(ids) % CONTEXT
    return torch.tensor(ids[:usable]).view(-1, CONTEXT)


def build_model(shape: Shape, start: Path | None) -> LlamaForCausalLM:
    if start is not None:
        return LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        eos_token_id=[END_OF_TEXT_ID, TURN_END_ID],
    )
    return model


def train(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM | None,
    rows: Rows,
    budget: Budget,
    learning_rate: float,
    args: argparse.Namespace,
) -> None:
    optimizers = build_optimizers(model, learning_rate)
    generator = torch.Generator().manual_seed(SEED + (args.start is not None))
    started = reported = time.monotonic()
    step, average_loss = 0, float("nan")
    while (spent := budget.spent(step, started)) < 1:
        set_learning_rate(optimizers, spent)
        loss = train_step(model, teacher, rows.draw(args.rows, generator), optimizers)
        average_loss = loss if step == 0 else 0.95 * average_loss + 0.05 * loss
        step += 1
        if time.monotonic() - reported > args.report_seconds:
            report(model, rows, step, average_loss, step * args.rows * CONTEXT / (time.monotonic() - started))
            save(model, args.folder)
            reported = time.monotonic()
    report(model, rows, step, average_loss, step * args.rows * CONTEXT / (time.monotonic() - started))
    save(model, args.folder)


def build_optimizers(model: torch.nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and the norms: about half the tokens of AdamW alone."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], spent: float) -> None:
    """Rise over the first fiftieth of the budget, then fall in a straight line to nothing."""
    scale = min(spent / 0.02, 1.0, (1.0 - spent) / 0.98) + 1e-3
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale


def train_step(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM | None,
    ids: torch.Tensor,  # [num_rows, CONTEXT]
    optimizers: list[torch.optim.Optimizer],
) -> float:
    loss = loss_of(model, teacher, ids)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loss.item()


def loss_of(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy with the text, or with the teacher's whole distribution where there is one."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    if teacher is None:
        return functional.cross_entropy(logits.float(), targets)
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float().softmax(-1)
    return functional.cross_entropy(logits.float(), wanted)


def report(model: LlamaForCausalLM, rows: Rows, step: int, loss: float, tokens_per_second: float) -> None:
    held_out = perplexity(model, rows.held_out[::8])
    print(f"step {step} loss {loss:.3f} held-out perplexity {held_out:.2f} {tokens_per_second:.0f} tok/s", flush=True)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    losses = [loss_of(model, None, row[None]) for row in ids]
    return float(torch.stack(losses).mean().exp())


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a bfloat16 copy; the model in training keeps its float32 weights."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.bfloat16().save_pretrained(folder)


if __name__ == "__main__":
    main()
