"""Hugging Face's continuous batching behind /v1/completions, just as much as the benchmark's client needs.

Run by engine_cpu.py in an environment of its own: the engine is transformers' ContinuousBatchingManager, the front is
thin, so that all engines are measured by one client over HTTP.
"""

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig


def make_app(model_folder: str, num_blocks: int) -> FastAPI:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=128),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=64, num_blocks=num_blocks, max_batch_tokens=512, use_async_batching=False
        ),
    )
    manager.start()
    app = FastAPI()

    async def outputs_of(body: dict) -> AsyncIterator[list[int]]:
        """All tokens so far, each time there are more."""
        queue: asyncio.Queue = asyncio.Queue()
        request_id = uuid.uuid4().hex
        manager.register_result_handler(request_id, queue.put_nowait)
        is_taken = manager.add_request(
            body["prompt"], request_id, max_new_tokens=body["max_tokens"], streaming=body.get("stream", False)
        )
        if is_taken is None:
            raise RuntimeError("the engine has stopped; its log says why")
        while True:
            output = await queue.get()
            yield output.generated_tokens
            if output.is_finished():
                return

    async def events(body: dict) -> AsyncIterator[bytes]:
        num_sent = 0
        async for tokens in outputs_of(body):
            if len(tokens) > num_sent:
                text = tokenizer.decode(tokens[num_sent:])
                num_sent = len(tokens)
                yield b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    @app.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        if body.get("stream"):
            return StreamingResponse(events(body), media_type="text/event-stream")
        *_, tokens = [tokens async for tokens in outputs_of(body)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
        return JSONResponse({"choices": [{"text": tokenizer.decode(tokens)}], "usage": usage})

    @app.get("/health")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    options = parser.parse_args()
    uvicorn.run(make_app(options.model, options.num_blocks), host=options.host, port=options.port, log_level="warning")
