"""OpenAI's /v1/completions: a prompt as text or token ids."""

import msgspec

from kvasir_router.dialects import openai
from kvasir_router.dialects.bounded_json import BoundedDecoder
from kvasir_router.dialects.dialect import ABSENT, Prompt, RoutingFields


class _Fields(RoutingFields, gc=False):
    prompt: msgspec.Raw = ABSENT


_decoder = BoundedDecoder(_Fields)


class Completions(openai.OpenAIErrors):
    name = "completions"
    end_of_stream: bytes | None = openai.END_OF_STREAM
    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = True

    def read(self, body: bytes) -> RoutingFields:
        return _decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        assert isinstance(fields, _Fields)
        return openai.text_prompt(fields.prompt, self.name, model, fields)
