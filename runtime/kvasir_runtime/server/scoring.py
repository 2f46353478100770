"""POST /score and /rerank: how well texts answer to others.

A model with one label scores each pair (a cross-encoder); of a model that makes embeddings a score is the cosine of the
two texts' vectors.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.pooling.description import Classification, Embedding
from kvasir_runtime.server.pooling import PoolingCall, PoolingRoute
from kvasir_runtime.server.pooling_fields import RerankRequest, ScoreRequest, Texts, text_of
from kvasir_runtime.server.pooling_inputs import PooledText, check_number
from kvasir_runtime.server.pooling_responses import (
    Document,
    Listing,
    PoolingUsage,
    RankedDocument,
    Ranking,
    ScoreEntry,
)
from kvasir_runtime.server.vectors import normalised

Pair = tuple[str, str]
Call = PoolingCall[ScoreRequest] | PoolingCall[RerankRequest]


async def score(call: PoolingCall[ScoreRequest]) -> bytes:
    scores, usage = await _scored(call, _pairs(call.wishes), call.wishes.instruction, _names(call.wishes))
    data = [ScoreEntry(index, each) for index, each in enumerate(scores)]
    heading = call.heading
    listing = Listing(id=heading.id, created=heading.created, model=heading.model, data=data, usage=usage)
    return await call.to_json(lambda: listing, len(data))


async def rerank(call: PoolingCall[RerankRequest]) -> bytes:
    wishes = call.wishes
    documents = [text_of(document) for document in wishes.documents]
    check_number(len(documents), call.limits, "documents")
    shown = [await call.reader.cut(document, wishes.max_tokens_per_doc) for document in documents]
    query = await call.reader.cut(text_of(wishes.query), wishes.max_tokens_per_query)
    pairs = [(query, document) for document in shown]
    scores, usage = await _scored(call, pairs, wishes.instruction, ("query", "documents"))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [RankedDocument(index, scores[index]) for index in order[: wishes.top_n or None]]
    if wishes.return_documents:
        for result in results:
            result.document = Document(documents[result.index])
    return await call.to_json(lambda: Ranking(call.heading.id, call.heading.model, results, usage), len(results))


async def _scored(
    call: Call, pairs: Sequence[Pair], instruction: str | None, fields: tuple[str, str]
) -> tuple[list[float], PoolingUsage]:
    """`fields`: that hold the two sides."""
    _, param = fields
    check_number(len(pairs), call.limits, param)
    if isinstance(call.pooling.task, Embedding):
        return await _cosines(call, pairs, fields)
    _check_has_one_label(call.pooling.task)
    texts = []
    for pair in pairs:
        texts.append(await _joined(call, pair, instruction, param))
        await asyncio.sleep(0)  # let others have their turn
    vectors = await call.vectors(texts, param)
    return [float(call.activated(vector)[0]) for vector in vectors], call.usage(texts)


async def _joined(call: Call, pair: Pair, instruction: str | None, param: str) -> PooledText:
    """Two texts as the model compares them. Raises InvalidRequestError where nobody knows how."""
    if call.pooling.joins_pairs:
        return await call.reader.read(*pair, param)
    prompt_of = call.serving.pair_prompt
    if prompt_of is None:
        raise InvalidRequestError(
            "how this model is told a query and a document is not known; start the server with --chat-template, a file "
            "that prints messages of the roles query and document"
        )
    query, document = pair
    if call.reader.most_tokens is not None:  # the words behind the document must stay
        without = await call.reader.read(prompt_of(query, "", instruction), None, param, special=False)
        room = call.reader.most_tokens - len(without.token_ids)
        document = await call.reader.cut(document, room) if room > 0 else ""
    return await call.reader.read(prompt_of(query, document, instruction), None, param, special=False)


async def _cosines(call: Call, pairs: Sequence[Pair], fields: tuple[str, str]) -> tuple[list[float], PoolingUsage]:
    """Each text's vector is made once."""
    prompts = call.pooling.inputs.prompts
    queries = {query: prompts.get("query", "") + query for query, _ in pairs}
    documents = {document: prompts.get("document", "") + document for _, document in pairs}
    sides = zip(fields, (queries, documents), strict=True)
    texts = [await call.reader.read(text, None, field) for field, side in sides for text in side.values()]
    vectors = [normalised(vector) for vector in await call.vectors(texts, fields[1])]
    of_query = dict(zip(queries, vectors, strict=False))
    of_document = dict(zip(documents, vectors[len(queries) :], strict=True))
    cosines = [float(np.dot(of_query[query], of_document[document])) for query, document in pairs]
    return cosines, call.usage(texts)


def _check_has_one_label(task: Classification) -> None:
    if len(task.labels) != 1:
        raise InvalidRequestError(
            f"this server's model tells {len(task.labels)} classes apart ({', '.join(task.labels[:4])}, ...), so its "
            "scores rank nothing; ask /classify"
        )


def _pairs(wishes: ScoreRequest) -> list[Pair]:
    """One to one, one to all, or each to its own."""
    left_name, right_name = _names(wishes)
    left, right = _listed(getattr(wishes, left_name)), _listed(getattr(wishes, right_name))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequestError(
            f"{left_name} has {len(left)} texts and {right_name} {len(right)}; there must be one, or as many as on the "
            "other side",
            left_name,
        )
    return list(zip(left, right, strict=True))


def _names(wishes: ScoreRequest) -> tuple[str, str]:
    """Of the fields that hold the two sides. Raises InvalidRequestError where there are none, or several."""
    sides = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))
    given = [[name for name in names if getattr(wishes, name) is not None] for names in sides]
    for names, found in zip(sides, given, strict=True):
        if len(found) != 1:
            raise InvalidRequestError(
                f"{' and '.join(found) or 'nothing'} was given, but one of {', '.join(names)} is needed", names[0]
            )
    return given[0][0], given[1][0]


def _listed(texts: Texts) -> list[str]:
    return [text_of(text) for text in texts] if isinstance(texts, list) else [text_of(texts)]


SCORE = PoolingRoute(paths=("/v1/score", "/score"), id_prefix="score-", wishes=ScoreRequest, answer=score)
RERANK = PoolingRoute(
    paths=("/v1/rerank", "/rerank", "/v2/rerank"), id_prefix="rerank-", wishes=RerankRequest, answer=rerank
)
