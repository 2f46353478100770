"""How a decoder that compares two texts is told them: in the words that it was trained on, or a template's.

Encoders have no need of words: their tokenizers join two texts.
"""

from collections.abc import Callable

from kvasir_chat.messages import ConversationRefusedError
from kvasir_chat.template import ChatTemplate
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.pooling.description import PoolingDescription

PairPrompt = Callable[[str, str, str | None], str]
"""Of a query, a document, and an instruction (None: the usual one)."""

_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""As Qwen3-Reranker's model card has it; with other words its scores mean nothing."""
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def pair_prompt_of(pooling: PoolingDescription, given: ChatTemplate | None) -> PairPrompt | None:
    """`given`: the template that the server was started with, if any. None: there are no words for it."""
    if given is not None:
        return _of_template(given)
    return _qwen3 if pooling.architecture.startswith("Qwen3") else None


def _qwen3(query: str, document: str, instruction: str | None) -> str:
    return _QWEN3.format(instruction=instruction or _QWEN3_INSTRUCTION, query=query, document=document)


def _of_template(template: ChatTemplate) -> PairPrompt:
    """As vLLM's score templates: messages of the roles query and document, an instruction before them as system."""

    def prompt(query: str, document: str, instruction: str | None) -> str:
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        try:
            return template.render(system + pair)
        except ConversationRefusedError as error:
            raise InvalidRequestError(str(error), error.field) from error

    return prompt
