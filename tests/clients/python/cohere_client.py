"""Cohere's own client, for rankings."""

from cohere import ClientV2
from features import EMBEDDER, KEY, URL, report

CLIENT = ClientV2(api_key=KEY, base_url=URL)


def rerank() -> None:
    documents = ["def f(): pass", "import os", "import sys"]
    answer = CLIENT.rerank(model=EMBEDDER, query="import os", documents=documents, top_n=2)
    first, second = answer.results
    assert (first.index, first.relevance_score > second.relevance_score) == (1, True)


if __name__ == "__main__":
    report(rerank)
