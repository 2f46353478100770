"""Print what an example model writes after a prompt, with Hugging Face's own generate.

python sample.py kvasir-python-7m "def read_lines(path):"
python sample.py kvasir-python-7m --chat "What does `os.path.join` do?"
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    print(sample(args.folder, args.prompt, args.chat, args.temperature, args.max_tokens))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def sample(folder: Path, prompt: str, chat: bool, temperature: float, max_tokens: int) -> str:
    """Return the new text only, special tokens included, so that the end of an answer can be seen."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    encoded = tokenizer(prompt, return_tensors="pt")
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    output = model.generate(**encoded, **how, max_new_tokens=max_tokens)  # type: ignore[misc]
    return str(tokenizer.decode(output[0, encoded.input_ids.shape[1] :]))


if __name__ == "__main__":
    main()
