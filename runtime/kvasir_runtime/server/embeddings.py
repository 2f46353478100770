"""POST /v1/embeddings as OpenAI has it, and /pooling and /classify as vLLM has them: a vector for each text."""

from collections.abc import Callable, Sequence

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.pooling.description import Embedding
from kvasir_runtime.server.pooling import PoolingCall, PoolingRoute
from kvasir_runtime.server.pooling_fields import ClassificationRequest, EmbeddingRequest
from kvasir_runtime.server.pooling_responses import ClassEntry, EmbeddingEntry, Listing, PoolingEntry, PoolingUsage
from kvasir_runtime.server.vectors import Vector, as_base64, as_json, cut, normalised

ListingData = list[EmbeddingEntry] | list[PoolingEntry] | list[ClassEntry]


async def embed(call: PoolingCall[EmbeddingRequest]) -> bytes:
    task = call.embedding
    finish = _finish(task, call.wishes)
    vectors, usage = await _vectors(call, _prompt(call))
    write = as_base64 if call.wishes.encoding_format == "base64" else as_json

    def listing() -> Listing:
        entries = [EmbeddingEntry(index, write(finish(vector))) for index, vector in enumerate(vectors)]
        return _listing(call, entries, usage)

    return await call.to_json(listing, _num_numbers(vectors))


async def pool(call: PoolingCall[EmbeddingRequest]) -> bytes:
    """Whatever the model makes, embeddings or classes' scores."""
    if call.wishes.encoding_format == "base64":
        raise InvalidRequestError("encoding_format: /pooling answers with numbers; leave it out", "encoding_format")
    task = call.pooling.task
    finish: Callable[[Vector], Vector] = call.activated
    prompt = ""
    if isinstance(task, Embedding):
        finish, prompt = _finish(task, call.wishes), _prompt(call)
    vectors, usage = await _vectors(call, prompt)

    def listing() -> Listing:
        entries = [PoolingEntry(index, as_json(finish(vector))) for index, vector in enumerate(vectors)]
        return _listing(call, entries, usage)

    return await call.to_json(listing, _num_numbers(vectors))


async def classify(call: PoolingCall[ClassificationRequest]) -> bytes:
    labels = call.classification.labels
    vectors, usage = await _vectors(call)

    def listing() -> Listing:
        entries = [
            ClassEntry(index, labels[int(probs.argmax())], as_json(probs), len(labels))
            for index, probs in enumerate(map(call.activated, vectors))
        ]
        return _listing(call, entries, usage)

    return await call.to_json(listing, _num_numbers(vectors))


async def _vectors(
    call: PoolingCall[EmbeddingRequest] | PoolingCall[ClassificationRequest], prompt: str = ""
) -> tuple[list[Vector], PoolingUsage]:
    """As the engine makes them."""
    texts = await call.reader.read_all(call.wishes.input, prompt)
    return await call.vectors(texts, "input"), call.usage(texts)


def _finish(task: Embedding, wishes: EmbeddingRequest) -> Callable[[Vector], Vector]:
    """Cut, and then of length 1. Raises InvalidRequestError."""
    size, asked = check_dimensions(task, wishes.dimensions), wishes.use_activation
    normalises = task.normalizes if asked is None else asked

    def finish(vector: Vector) -> Vector:
        shorter = cut(vector, size)
        return normalised(shorter) if normalises else shorter

    return finish


def _prompt(call: PoolingCall[EmbeddingRequest]) -> str:
    """Raises InvalidRequestError for one that the model does not have."""
    prompts, name = call.pooling.inputs.prompts, call.wishes.prompt_name
    if name is None:
        default = call.pooling.inputs.default_prompt
        return "" if default is None else prompts[default]
    if name not in prompts:
        known = ", ".join(repr(known) for known in sorted(prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name: {name[:80]!r} is no prompt of this model; known: {known}", "prompt_name"
        )
    return prompts[name]


def check_dimensions(task: Embedding, asked: int | None) -> int | None:
    """To how many numbers vectors are cut. Raises InvalidRequestError for what the model was not trained for."""
    if asked is None or asked == task.size:
        return None
    if task.shorter_sizes is None:
        raise InvalidRequestError(
            f"dimensions: {asked} was given, but this model's vectors have {task.size} numbers and are not made to be "
            "cut; leave it out, or start the server with --hf-overrides '{\"is_matryoshka\": true}' if they are",
            "dimensions",
        )
    if asked > task.size or (task.shorter_sizes and asked not in task.shorter_sizes):
        known = ", ".join(map(str, task.shorter_sizes)) or f"1 to {task.size}"
        raise InvalidRequestError(f"dimensions: {asked} was given, but this model's vectors have {known}", "dimensions")
    return asked


def _listing(
    call: PoolingCall[EmbeddingRequest] | PoolingCall[ClassificationRequest], data: ListingData, usage: PoolingUsage
) -> Listing:
    heading = call.heading
    return Listing(id=heading.id, created=heading.created, model=heading.model, data=data, usage=usage)


def _num_numbers(vectors: Sequence[Vector]) -> int:
    return sum(map(len, vectors))


EMBEDDINGS = PoolingRoute(paths=("/v1/embeddings",), id_prefix="embd-", wishes=EmbeddingRequest, answer=embed)
POOLING = PoolingRoute(paths=("/pooling",), id_prefix="pool-", wishes=EmbeddingRequest, answer=pool)
CLASSIFY = PoolingRoute(
    paths=("/classify", "/v1/classify"), id_prefix="classify-", wishes=ClassificationRequest, answer=classify
)
