// Codex, OpenAI's coding agent, which speaks Responses. Its model is one of its own, behind a template that shows it the
// last exchange alone: the instructions and most tools are parsed, but not written into the prompt. A tool is an MCP server's.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { rmSync } from "node:fs";
import { mkdtemp, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { ANSWER, BASE_URL, CITY_SCHEMA, CODER, KEY, QUESTION, report } from "./features.mjs";

const CODEX = fileURLToPath(new URL("node_modules/.bin/codex", import.meta.url));
const CONFIG = `
model = "${CODER}"
model_provider = "kvasir"
[model_providers.kvasir]
name = "kvasir"
base_url = "${BASE_URL}"
wire_api = "responses"
env_key = "KVASIR_KEY"
request_max_retries = 0
stream_max_retries = 0
[mcp_servers.sky]
command = "node"
args = ["${fileURLToPath(new URL("mcp_server.mjs", import.meta.url))}"]
default_tools_approval_mode = "approve"
`;
const home = await mkdtemp(join(homedir(), ".cache", "kvasir", "codex-"));  // it refuses folders below /tmp
process.on("exit", () => rmSync(home, { recursive: true }));
await writeFile(join(home, "config.toml"), CONFIG);
await writeFile(join(home, "schema.json"), JSON.stringify(CITY_SCHEMA));

async function turn(question, ...args) {
  const env = { ...process.env, CODEX_HOME: home, KVASIR_KEY: KEY };
  const running = promisify(execFile)(CODEX, ["exec", ...args, "--json", "--skip-git-repo-check", question], { env, cwd: home });
  running.child.stdin.end();
  const events = (await running).stdout.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  const last = events.at(-1);
  assert.equal(last.type, "turn.completed");
  assert(last.usage.output_tokens > 0);
  return events.filter((event) => event.type === "item.completed").map((event) => event.item);
}

async function chat() {
  assert.equal((await turn("Hello")).at(-1).text, "Hello!");
}

async function conversation() {
  assert.equal((await turn("Hello", "resume", "--last")).at(-1).text, "Hello!");
}

async function tools() {
  const items = await turn(QUESTION);
  const call = items.find((item) => item.type === "mcp_tool_call");
  assert.deepEqual([call.server, call.tool, call.arguments, call.status], ["sky", "weather", { city: "Paris" }, "completed"]);
  assert(items.at(-1).text.startsWith(ANSWER));
}

async function structured() {
  const items = await turn("Hello", "--output-schema", join(home, "schema.json"));
  assert.deepEqual(Object.keys(JSON.parse(items.at(-1).text)), ["city"]);
}

await report({ chat, conversation, tools, structured });
