// Ollama's own client.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { ANSWER, CALLER, CITY_SCHEMA, CODER, EMBEDDER, QUESTION, URL, WRITER, report } from "./features.mjs";

const CLIENT = new Ollama({ host: URL });
const ASKED = [{ role: "user", content: QUESTION }];
const TOOLS = [{ type: "function", function: { name: "weather", parameters: CITY_SCHEMA } }];
const FEW = { num_predict: 8, temperature: 0 };
const CAPITAL = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, is_capital: { type: "boolean" } },
  required: ["city", "is_capital"],
  additionalProperties: false,
};

async function chat() {
  const answer = await CLIENT.chat({ model: WRITER, messages: ASKED, options: FEW });
  assert(answer.message.content);
  assert.equal(answer.done_reason, "length");
}

async function stream() {
  let text = "", last;
  for await (last of await CLIENT.chat({ model: WRITER, messages: ASKED, options: FEW, stream: true })) {
    text += last.message.content;
  }
  assert(text);
  assert.equal(last.eval_count, 8);
}

async function generate() {
  assert((await CLIENT.generate({ model: WRITER, prompt: QUESTION, options: FEW })).response);
}

async function load() {
  assert.equal((await CLIENT.chat({ model: WRITER, messages: [] })).done_reason, "load");
  assert.equal((await CLIENT.generate({ model: WRITER, prompt: "" })).done_reason, "load");
}

async function tools() {
  const options = { temperature: 0 };
  const { message } = await CLIENT.chat({ model: CALLER, messages: ASKED, tools: TOOLS, options });
  const [call] = message.tool_calls;
  assert.deepEqual(call.function, { index: 0, name: "weather", arguments: { city: "Paris" } });
  const messages = [...ASKED, message, { role: "tool", tool_name: "weather", content: "12" }];
  const answer = await CLIENT.chat({ model: CALLER, messages, tools: TOOLS, options });
  assert(answer.message.content.startsWith(ANSWER));
}

async function structured() {
  const answer = await CLIENT.chat({ model: WRITER, messages: ASKED, format: CAPITAL });
  assert(["Paris", "Rome"].includes(JSON.parse(answer.message.content).city));
}

async function errors() {
  await assert.rejects(CLIENT.chat({ model: "nobody", messages: ASKED }), { name: "ResponseError", status_code: 404 });
}

async function models() {
  const names = (await CLIENT.list()).models.map((model) => model.model);
  assert.deepEqual(names.sort(), [CALLER, CODER, EMBEDDER, WRITER].sort());
  assert((await CLIENT.show({ model: CALLER })).capabilities.includes("tools"));
}

await report({ chat, stream, generate, load, tools, structured, errors, models });
