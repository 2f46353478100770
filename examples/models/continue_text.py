"""Let a model go on from the training text, so that draft heads learn from what their target itself would write.

    python continue_text.py kvasir-python-7m text.pt --minutes 4

The file holds token ids, each [num_rows, ROW], and is all that the heads' trainers read: `continued` (every second row
greedily, the others at temperature 1), `corpus`, and `held_out`: text held out of the corpus, continued greedily,
half code and half chats.
"""

import argparse
import time
from pathlib import Path

import torch
from corpus import gather
from train import SEED, Rows, encode, tokenizer_for
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging

PROMPT, CONTINUATION = 128, 256
ROW = PROMPT + CONTINUATION
BATCH = 64
NUM_CORPUS_ROWS = 2048


def main() -> None:
    args = parse_arguments()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    corpus = gather(SEED)
    rows = encode(corpus, tokenizer_for(args.target, corpus))
    model = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    text = {
        "continued": continue_training_text(model, rows, args.minutes * 60),
        "corpus": draw(rows, NUM_CORPUS_ROWS, ROW, torch.Generator().manual_seed(SEED + 1)),
        "held_out": continue_held_out_text(model, rows),
    }
    torch.save(text, args.file)
    print(f"{len(text['continued'])} rows, {CONTINUATION} tokens of each the model's own")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    return parser.parse_args()


def continue_training_text(model: LlamaForCausalLM, rows: Rows, seconds: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    temperature = (torch.arange(BATCH) % 2).float()
    batches, end = [], time.monotonic() + seconds
    while not batches or time.monotonic() < end:
        prompts = draw(rows, BATCH, PROMPT, generator)
        batches.append(continue_rows(model, prompts, temperature, generator))
    return torch.cat(batches)


def continue_held_out_text(model: LlamaForCausalLM, rows: Rows) -> torch.Tensor:
    prompts = torch.cat([rows.held_out[: BATCH // 2], rows.held_out_chat[: BATCH // 2]])[:, :PROMPT]
    return continue_rows(model, prompts, torch.zeros(BATCH), torch.Generator())


def draw(rows: Rows, num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Code and chats, half and half, in any order."""
    drawn = rows.draw(2 * num_rows, generator)[::2, :length]
    return drawn[torch.randperm(num_rows, generator=generator)]


@torch.no_grad()
def continue_rows(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,  # [num_rows, prompt length]
    temperature: torch.Tensor,  # [num_rows], 0: greedy
    generator: torch.Generator,
) -> torch.Tensor:
    """Prompts with CONTINUATION tokens after each; the end of a text does not end a row."""
    ids, newest, cache = prompts, prompts, DynamicCache(config=model.config)
    for _ in range(CONTINUATION):
        output = model(input_ids=newest, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        exponential = torch.empty_like(logits).exponential_(generator=generator)
        newest = (logits - temperature[:, None] * exponential.log()).argmax(-1, keepdim=True)
        ids = torch.cat([ids, newest], 1)
    return ids


if __name__ == "__main__":
    main()
