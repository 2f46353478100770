// Claude Code, Anthropic's coding agent, which speaks Messages. Its model is that of Codex, and so is its tool.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { rmSync } from "node:fs";
import { mkdtemp, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { ANSWER, CODER, KEY, QUESTION, URL as SERVICE, report } from "./features.mjs";

const CLAUDE = fileURLToPath(new URL("node_modules/.bin/claude", import.meta.url));
const SERVERS = { sky: { command: "node", args: [fileURLToPath(new URL("mcp_server.mjs", import.meta.url))] } };
const home = await mkdtemp(join(homedir(), ".cache", "kvasir", "claude-"));
process.on("exit", () => rmSync(home, { recursive: true }));
await writeFile(join(home, "mcp.json"), JSON.stringify({ mcpServers: SERVERS }));

async function turn(question, ...args) {
  const env = {
    ...process.env, HOME: home, ANTHROPIC_BASE_URL: SERVICE, ANTHROPIC_API_KEY: KEY, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  };
  const running = promisify(execFile)(CLAUDE, [
    "-p", question, ...args, "--model", CODER, "--mcp-config", join(home, "mcp.json"), "--strict-mcp-config",
    "--allowedTools", "mcp__sky__weather", "--output-format", "stream-json", "--verbose",
  ], { env, cwd: home });
  running.child.stdin.end();
  const events = (await running).stdout.trim().split("\n").map((line) => JSON.parse(line));
  assert.equal(events.at(-1).subtype, "success");
  assert(events.at(-1).usage.output_tokens > 0);
  return events;
}

async function chat() {
  assert.equal((await turn("Hello")).at(-1).result, "Hello!");
}

async function conversation() {
  assert.equal((await turn("Hello", "--continue")).at(-1).result, "Hello!");
}

async function thinking() {
  const blocks = (await turn("Hello")).flatMap((event) => event.message?.content ?? []);
  assert(blocks.find((block) => block.type === "thinking").thinking);
}

async function tools() {
  const events = await turn(QUESTION);
  const call = events.flatMap((event) => event.message?.content ?? []).find((block) => block.type === "tool_use");
  assert.deepEqual([call.name, call.input], ["mcp__sky__weather", { city: "Paris" }]);
  assert(events.at(-1).result.startsWith(ANSWER));
}

await report({ chat, conversation, thinking, tools });
