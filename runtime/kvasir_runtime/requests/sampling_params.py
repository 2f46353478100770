"""How a request's sequences are continued: drawn token by token, or searched."""

from typing import Literal

import msgspec

EarlyStopping = bool | Literal["never"]

MAX_LOGIT_BIAS = 1024
"""Tokens that a client may change the logits of; each row of a batch is as wide as the one with most."""
MAX_STOP_TOKEN_IDS = 1024
"""The same of tokens that end a sequence, the model's own not counted."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is continued. All values are validated by the API process."""

    max_tokens: int
    seed: int
    """Seed of the counter-based generator (64 bit, unsigned); the API process draws one when the client gave none."""
    min_tokens: int = 0
    """No stop token is sampled before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    """No others are sampled; None: all may be."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences, none empty, that the output never holds."""
    logprobs: int | None = None
    """How many most likely alternatives to report with each output token; 0: only the token's own; None: nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Every token id that ends the sequence (end-of-sequence ids are in here unless the client ignores them)."""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search as Hugging Face defines it: the request's sequences are its best hypotheses, best first."""

    width: int
    length_penalty: float = 1.0
    """Exponent of the length by which a hypothesis' summed log-probability is divided."""
    early_stopping: EarlyStopping = False
    """When to end, once `width` hypotheses are complete: True at once, False when no beam as it is has a better score
    than the worst of them, "never" when none could come to one by going on."""
