// The AI SDK, with its openai-compatible provider and with OpenAI's, which speaks Responses.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  ANSWER, BASE_URL, CALLER, EMBEDDER, KEY, QUESTION, VECTOR_SIZE, WRITER, report,
} from "./features.mjs";

const compatible = createOpenAICompatible({
  name: "kvasir", baseURL: BASE_URL, apiKey: KEY, supportsStructuredOutputs: true, includeUsage: true,
});
const openai = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const Capital = z.object({ city: z.enum(["Paris", "Rome"]), is_capital: z.boolean() });
const TOOLS = {
  weather: tool({ inputSchema: z.object({ city: z.string() }), execute: async ({ city }) => {
    assert.equal(city, "Paris");
    return "12";
  } }),
};
const models = (name) => [compatible(name), openai.chat(name), openai(name)];

async function chat() {
  for (const model of models(WRITER)) {
    const { text, usage } = await generateText({
      model, prompt: QUESTION, maxOutputTokens: 16, temperature: 0, maxRetries: 0,
    });
    assert(text);
    assert(usage.outputTokens > 0);
  }
}

async function stream() {
  for (const model of models(WRITER)) {
    const { textStream, usage } = streamText({
      model, prompt: QUESTION, maxOutputTokens: 16, temperature: 0, maxRetries: 0,
    });
    let text = "";
    for await (const part of textStream) text += part;
    assert(text);
    assert((await usage).outputTokens > 0);
  }
}

async function tools() {
  for (const model of models(CALLER)) {
    const { text } = await generateText({
      model, prompt: QUESTION, tools: TOOLS, temperature: 0, stopWhen: stepCountIs(3), maxRetries: 0,
    });
    assert(text.startsWith(ANSWER), text);
  }
}

async function streamed_tools() {
  for (const model of models(CALLER)) {
    const { text } = streamText({
      model, prompt: QUESTION, tools: TOOLS, temperature: 0, stopWhen: stepCountIs(3), maxRetries: 0,
    });
    assert((await text).startsWith(ANSWER), await text);
  }
}

async function structured() {
  for (const model of models(WRITER)) {
    const { output } = await generateText({
      model, prompt: QUESTION, output: Output.object({ schema: Capital }), maxRetries: 0,
    });
    assert(Capital.safeParse(output).success);
  }
}

async function reasoning() {
  const { reasoningText } = await generateText({
    model: compatible(CALLER), prompt: "Hello", temperature: 0,
  });
  assert.equal(reasoningText, "A greeting.");
}

async function embeddings() {
  for (const model of [compatible.textEmbeddingModel(EMBEDDER), openai.embedding(EMBEDDER)]) {
    const answer = await embedMany({ model, values: ["import os", "def f(): pass"], maxRetries: 0 });
    assert.deepEqual(answer.embeddings.map((each) => each.length), [VECTOR_SIZE, VECTOR_SIZE]);
  }
}

await report({ chat, stream, tools, streamed_tools, structured, reasoning, embeddings });
