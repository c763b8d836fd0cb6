// Agents for editors by their commands, Continue's `cn` and Cline's `cline`, which send what their extensions send.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { client, model, question, say, url, versionOf } from "./report.mjs";

const folder = mkdtempSync(join(tmpdir(), "agent-"));
const run = (name, ...words) => {
  // Cline would leave a process that its other windows share
  const env = { ...process.env, HOME: folder, CLINE_SESSION_BACKEND_MODE: "local", CONTINUE_TELEMETRY_ENABLED: "0" };
  const done = spawnSync(join(process.cwd(), "node_modules", ".bin", name), words, { cwd: folder, env, input: "" });
  console.error(`${done.stdout}\n${done.stderr}`);
  return done;
};

const agents = {
  "@continuedev/cli": () => {
    const defaultCompletionOptions = { maxTokens: 128 }; // so small a model may not end
    const ours = { name: model, provider: "openai", model, apiBase: url, apiKey: "none", defaultCompletionOptions };
    const config = join(folder, "config.json");
    writeFileSync(config, JSON.stringify({ name: "Ours", version: "1.0.0", schema: "v1", models: [ours] }));
    const done = run("cn", "--config", config, "-p", question);
    return { exit_code: done.status, answer: String(done.stdout).trim() };
  },
  cline: () => {
    run("cline", "auth", "-p", "openai-compatible", "-k", "none", "-m", model, "-b", url);
    // it plans, and writes nothing
    const done = run("cline", "-p", "--json", "-t", "300", "-P", "openai-compatible", "-m", model, question);
    const last = JSON.parse(String(done.stdout).trim().split("\n").findLast((line) => line.startsWith("{")) ?? "{}");
    return { exit_code: done.status, answer: last.text };
  },
};
say({ version: versionOf(client), ran: { "a question to the agent": { told: agents[client]() } } });
