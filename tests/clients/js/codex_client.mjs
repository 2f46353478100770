// Codex, OpenAI's coding agent, which speaks Responses. Its model is the caller behind a template that shows it the last
// exchange alone: the instructions and tools that come before are parsed, but not written into the prompt.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { rmSync } from "node:fs";
import { mkdtemp, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { BASE_URL, CITY_SCHEMA, CODER, KEY, report } from "./features.mjs";

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
`;
const home = await mkdtemp(join(homedir(), ".cache", "kvasir", "codex-"));  // it refuses folders below /tmp
process.on("exit", () => rmSync(home, { recursive: true }));
await writeFile(join(home, "config.toml"), CONFIG);
await writeFile(join(home, "schema.json"), JSON.stringify(CITY_SCHEMA));

async function turn(...args) {
  const env = { ...process.env, CODEX_HOME: home, KVASIR_KEY: KEY };
  const running = promisify(execFile)(CODEX, ["exec", ...args, "--json", "--skip-git-repo-check", "Hello"], { env, cwd: home });
  running.child.stdin.end();
  const events = (await running).stdout.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  const last = events.at(-1);
  assert.equal(last.type, "turn.completed");
  assert(last.usage.output_tokens > 0);
  return events.findLast((event) => event.item?.type === "agent_message").item.text;
}

async function chat() {
  assert.equal(await turn(), "Hello!");
}

async function conversation() {
  assert.equal(await turn("resume", "--last"), "Hello!");
}

async function structured() {
  const answer = JSON.parse(await turn("--output-schema", join(home, "schema.json")));
  assert.deepEqual(Object.keys(answer), ["city"]);
}

await report({ chat, conversation, structured });
