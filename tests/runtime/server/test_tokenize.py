"""POST /tokenize and /detokenize, in vLLM's shapes."""


def test_text_and_back(running) -> None:
    text = "the quick 日本語 😀"
    answer = running.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == running.tokenizer.encode(text).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert answer["token_strs"] == running.tokenizer.encode(text).tokens
    back = running.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_messages_are_tokenized_as_a_chat_would(running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    running.client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    answer = running.http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == running.core.received[0].prompt_token_ids


def test_token_outside_the_vocabulary_is_refused(running) -> None:
    answer = running.http.post("/detokenize", json={"tokens": [5, 10**6]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
