// OpenAI's own CLIENT.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ANSWER, BASE_URL, CALLER, CITY_SCHEMA, EMBEDDER, KEY, QUESTION, VECTOR_SIZE, WRITER, report,
} from "./features.mjs";

const CLIENT = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const ASKED = [{ role: "user", content: QUESTION }];
const TOOLS = [{ type: "function", function: { name: "weather", strict: true, parameters: CITY_SCHEMA } }];
const Capital = z.object({ city: z.enum(["Paris", "Rome"]), is_capital: z.boolean() });

async function chat() {
  const answer = await CLIENT.chat.completions.create({
    model: WRITER, messages: ASKED, max_tokens: 8, temperature: 0,
  });
  assert(answer.choices[0].message.content);
  assert(answer.usage.completion_tokens > 0);
}

async function stream() {
  const chunks = await CLIENT.chat.completions.create({
    model: WRITER, messages: ASKED, max_tokens: 8, temperature: 0, stream: true,
  });
  let text = "";
  for await (const chunk of chunks) text += chunk.choices[0]?.delta.content ?? "";
  assert(text);
}

async function abort() {
  const chunks = await CLIENT.chat.completions.create({
    model: WRITER, messages: ASKED, max_tokens: 500, stream: true,
  });
  for await (const chunk of chunks) {
    assert(chunk.choices);
    break; // aborts the request
  }
}

async function tools() {
  const run = CLIENT.chat.completions.runTools({
    model: CALLER,
    messages: ASKED,
    temperature: 0,
    tools: [{ type: "function", function: { ...TOOLS[0].function, parse: JSON.parse, function: ({ city }) => {
      assert.equal(city, "Paris");
      return "12";
    } } }],
  });
  assert((await run.finalContent()).startsWith(ANSWER));
}

async function structured() {
  const answer = await CLIENT.chat.completions.parse({
    model: WRITER, messages: ASKED, response_format: zodResponseFormat(Capital, "capital"),
  });
  assert(Capital.safeParse(answer.choices[0].message.parsed).success);
}

async function responses() {
  const answer = await CLIENT.responses.create({ model: CALLER, input: "Hello", temperature: 0 });
  assert.equal(answer.output_text, "Hello!");
  const parsed = await CLIENT.responses.parse({
    model: WRITER, input: QUESTION, text: { format: zodTextFormat(Capital, "capital") },
  });
  assert(Capital.safeParse(parsed.output_parsed).success);
}

async function streamed_responses() {
  const events = CLIENT.responses.stream({ model: CALLER, input: "Hello", temperature: 0 });
  assert.equal((await events.finalResponse()).output_text, "Hello!");
}

async function embeddings() {
  const answer = await CLIENT.embeddings.create({ model: EMBEDDER, input: ["import os", "def f(): pass"] });
  assert.deepEqual(answer.data.map((each) => each.embedding.length), [VECTOR_SIZE, VECTOR_SIZE]);
}

async function errors() {
  await assert.rejects(CLIENT.chat.completions.create({
    model: "nobody", messages: ASKED,
  }), OpenAI.NotFoundError);
  await assert.rejects(
    CLIENT.chat.completions.create({
      model: WRITER, messages: ASKED, max_tokens: -1,
    }), OpenAI.BadRequestError,
  );
}

await report({ chat, stream, abort, tools, structured, responses, streamed_responses, embeddings, errors });
