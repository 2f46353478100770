// Anthropic's own CLIENT.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { CALLER, CITY_SCHEMA, KEY, QUESTION, URL, WRITER, report } from "./features.mjs";

const CLIENT = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const ASKED = [{ role: "user", content: QUESTION }];
const TOOLS = [{ name: "weather", input_schema: CITY_SCHEMA }];

async function chat() {
  const answer = await CLIENT.messages.create({
    model: WRITER, messages: ASKED, max_tokens: 8, temperature: 0,
  });
  assert(answer.content[0].text);
}

async function stream() {
  const events = CLIENT.messages.stream({ model: WRITER, messages: ASKED, max_tokens: 8, temperature: 0 });
  assert((await events.finalMessage()).content[0].text);
}

async function tools() {
  const answer = await CLIENT.messages.create({
    model: CALLER, messages: ASKED, tools: TOOLS, max_tokens: 200, temperature: 0,
  });
  assert.deepEqual(answer.content.find((block) => block.type === "tool_use").input, { city: "Paris" });
}

async function streamed_tools() {
  const events = CLIENT.messages.stream({
    model: CALLER, messages: ASKED, tools: TOOLS, max_tokens: 200, temperature: 0,
  });
  const answer = await events.finalMessage();
  assert.deepEqual(answer.content.find((block) => block.type === "tool_use").input, { city: "Paris" });
}

await report({ chat, stream, tools, streamed_tools });
