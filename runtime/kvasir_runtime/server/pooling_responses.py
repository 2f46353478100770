"""Answers of the routes that make vectors, in OpenAI's, vLLM's and Jina's shapes; what is UNSET is left out."""

import msgspec
from msgspec import UNSET, UnsetType


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingEntry(msgspec.Struct):
    index: int
    embedding: msgspec.Raw | str
    """Numbers, or base64 of little-endian float32."""
    object: str = "embedding"


class PoolingEntry(msgspec.Struct):
    index: int
    data: msgspec.Raw
    object: str = "pooling"


class ClassEntry(msgspec.Struct):
    index: int
    label: str
    probs: msgspec.Raw
    num_classes: int


class ScoreEntry(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class Listing(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[EmbeddingEntry] | list[PoolingEntry] | list[ClassEntry] | list[ScoreEntry]
    usage: PoolingUsage
    object: str = "list"


class Document(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct):
    index: int
    """In the request."""
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[RankedDocument]
    """Best first."""
    usage: PoolingUsage
