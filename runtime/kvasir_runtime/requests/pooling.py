"""What a request wants of its prompt where it wants no tokens."""

import msgspec


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A vector, made of what the model computes of the prompt's tokens. The request ends with it."""

    needs_whole_prompt: bool
    """Whether all tokens are to be computed, cached or not: the vector is made of more than the last."""
    second_text_start: int | None = None
    """Position of the first token of the second of two texts, which some models tell apart; None: there is one."""
