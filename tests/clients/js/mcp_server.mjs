// A server of the Model Context Protocol with one tool, over standard input and output.

import { createInterface } from "node:readline";
import { CITY_SCHEMA } from "./features.mjs";

const TOOL = { name: "weather", inputSchema: CITY_SCHEMA, annotations: { readOnlyHint: true } };
const RESULTS = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "sky", version: "1" },
  }),
  "tools/list": () => ({ tools: [TOOL] }),
  "tools/call": ({ arguments: { city } }) => ({ content: [{ type: "text", text: city === "Paris" ? "12" : "?" }] }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  const result = RESULTS[method]?.(params) ?? {};
  if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, result }));
}
