"""/tokenize and /detokenize: an engine answers them without its device, so there is nothing to prefill."""

from kvasir_router.dialects import openai
from kvasir_router.dialects.bounded_json import BoundedDecoder
from kvasir_router.dialects.dialect import Prompt, RoutingFields

_decoder = BoundedDecoder(RoutingFields)


class Tokenize(openai.OpenAIErrors):
    name = "tokenize"
    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def read(self, body: bytes) -> RoutingFields:
        return _decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        return None
