// Vercel's AI SDK with @ai-sdk/openai and its defaults, which are the Responses API.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { z } from "zod";

const [url, model, question] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const require = createRequire(import.meta.url);
const versionOf = (name) => {
  const path = require.resolve(name);
  return JSON.parse(readFileSync(path.slice(0, path.lastIndexOf(`/${name}/`)) + `/${name}/package.json`)).version;
};

const asked = [];
const weather = tool({
  description: "Return the weather of a city",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async ({ city }) => {
    asked.push(city);
    return "It rains.";
  },
});

const whole = await generateText({ model: openai(model), prompt: question, temperature: 0 });
const again = await generateText({
  model: openai(model),
  messages: [{ role: "user", content: question }, ...whole.response.messages, { role: "user", content: "And again?" }],
});
const stream = streamText({ model: openai(model), prompt: question, temperature: 0 });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
const called = await generateText({
  model: openai(model),
  prompt: question,
  tools: { weather },
  toolChoice: "required",
  stopWhen: stepCountIs(2),
});
const shaped = await generateObject({
  model: openai(model),
  schema: z.object({ number: z.number().int(), word: z.enum(["odd", "even"]) }),
  prompt: question,
});
console.log(
  JSON.stringify({
    version: versionOf("@ai-sdk/openai"),
    text: whole.text,
    finish: whole.finishReason,
    usage: [whole.usage.inputTokens, whole.usage.outputTokens],
    again: again.finishReason,
    streamed: pieces.join(""),
    pieces: pieces.length,
    asked,
    steps: called.steps.length,
    shaped: shaped.object,
  }),
);
