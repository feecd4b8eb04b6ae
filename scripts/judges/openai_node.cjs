// The `openai` package for Node as a client: `scripts/judges/openai_node`. NODE_PATH has the package.
// KEY is of a tenant without limits, LIMITED_KEY of one with a request a minute and no priority.
"use strict";
const assert = require("node:assert");
const OpenAI = require("openai");
const { LengthFinishReasonError } = require("openai/core/error");

const url = process.argv[2];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.KEY, maxRetries: 0 });
const limited = client.withOptions({ apiKey: process.env.LIMITED_KEY });
const PROMPT = "The capital of France is";
const messages = [{ role: "user", content: "Name three rivers." }];
const greedy = { temperature: 0, max_tokens: 12 };
const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const IMMEDIATE_MS = 5000; // for what takes milliseconds, on a busy machine
let model;
let rows = 0;
let faults = 0;

function holds(name, good, seen = "") {
  rows += 1;
  faults += good ? 0 : 1;
  const text = (typeof seen === "string" ? seen : JSON.stringify(seen)).replace(/\s+/g, " ");
  console.log(`${(good ? "ok" : "DISAGREES").padEnd(9)}  ${name.padEnd(44)}  ${good ? text.slice(0, 96) : text}`);
}

function same(name, got, wanted) {
  let good = true;
  try {
    assert.deepStrictEqual(got, wanted);
  } catch {
    good = false;
  }
  holds(name, good, good ? got : { got, wanted });
}

async function raises(name, kind, call) {
  try {
    const result = await call();
    holds(name, false, `no ${kind.name}, but ${JSON.stringify(result)}`);
  } catch (error) {
    holds(name, error.constructor === kind, `${error.constructor.name}: ${error.message}`);
    return error;
  }
}

const complete = (prompt, more, options) => client.completions.create({ model, prompt, ...greedy, ...more }, options);
const chat = (more, options) => client.chat.completions.create({ model, messages, ...greedy, ...more }, options);

async function idleMs() {
  const begun = performance.now();
  for (;;) {
    const reply = await fetch(`${url}/metrics`, { headers: { authorization: `Bearer ${process.env.KEY}` } });
    const text = await reply.text();
    const running = /^jaxserve_requests_running (\S+)$/m.exec(text)[1];
    const waited = performance.now() - begun;
    if (Number(running) === 0 || waited > IMMEDIATE_MS) return waited;
    await new Promise((resume) => setTimeout(resume, 20));
  }
}

async function judgeModels() {
  const found = await client.models.list();
  model = found.data[0].id;
  same("models.list", found.data.length, 1);
  same("models.retrieve", (await client.models.retrieve(model)).id, model);
  await raises("models.retrieve of another", OpenAI.NotFoundError, () => client.models.retrieve("x"));
}

async function judgeCompletions() {
  const whole = await complete(PROMPT);
  const text = whole.choices[0].text;
  same("completion", [whole.object, whole.choices[0].finish_reason, whole.usage.completion_tokens], ["text_completion", "length", 12]);
  const { tokens } = await client.post(`${url}/tokenize`, { body: { prompt: PROMPT } });
  same("prompt as token ids", (await complete(tokens)).choices[0].text, text);
  same("prompts: texts", (await complete([PROMPT, PROMPT])).choices.map((choice) => choice.text), [text, text]);
  same("prompts: lists of ids", (await complete([tokens, tokens])).choices.map((choice) => choice.text), [text, text]);
  const { logprobs, text: echoed } = (await complete(PROMPT, { echo: true, logprobs: 1, max_tokens: 2 })).choices[0];
  same("echo: the first token is not scored", logprobs.token_logprobs[0], null);
  same("echo: tokens join to the text", logprobs.tokens.join(""), echoed);
  const drawn = await complete(PROMPT, { n: 3, seed: 7, temperature: 1 });
  same("n: indexes", drawn.choices.map((choice) => choice.index), [0, 1, 2]);
  const extras = await complete(PROMPT, { max_tokens: 40, min_tokens: 40, ignore_eos: true, top_k: 5 });
  same("extras in the body", extras.usage.completion_tokens, 40);
}

async function judgeChat() {
  const { data, request_id: id } = await chat({}, { headers: { "x-request-id": "judge-1" } }).withResponse();
  same("chat", [data.object, data.choices[0].message.role, data.choices[0].finish_reason], ["chat.completion", "assistant", "length"]);
  same("chat: x-request-id comes back", id, "judge-1");
  const scored = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0];
  const bytes = Buffer.from(scored.logprobs.content.flatMap((token) => token.bytes));
  same("logprobs: bytes join to the content", bytes.toString(), scored.message.content);
  same("max_completion_tokens", (await chat({ max_tokens: undefined, max_completion_tokens: 5 })).usage.completion_tokens, 5);
}

async function judgeStreams() {
  const asks = {
    chat: [chat, (choice) => choice.delta?.content ?? choice.message?.content ?? ""],
    completions: [(more) => complete(PROMPT, more), (choice) => choice.text],
  };
  for (const [name, [ask, textOf]] of Object.entries(asks)) {
    const whole = await ask({});
    const chunks = [];
    for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
    const choices = chunks.flatMap((chunk) => chunk.choices);
    same(`${name} stream: the text of the whole`, choices.map(textOf).join(""), textOf(whole.choices[0]));
    same(`${name} stream: one end`, choices.map((choice) => choice.finish_reason).filter(Boolean), ["length"]);
    same(`${name} stream: usage last`, [chunks.at(-1).choices, chunks.at(-1).usage], [[], whole.usage]);
  }
  const helper = client.chat.completions.stream({ model, messages, ...greedy, stop: ["longest"] });
  let heard = "";
  helper.on("content", (delta) => (heard += delta));
  const final = await helper.finalChatCompletion();
  same("chat.completions.stream: content events", heard, final.choices[0].message.content);
}

async function judgeForms() {
  const response_format = { type: "json_schema", json_schema: { name: "trip", schema, strict: true } };
  const { message } = (await client.chat.completions.parse({ model, messages, temperature: 0, max_tokens: 80, response_format })).choices[0];
  const wanted = JSON.parse(message.content);
  same("parse: the schema's object", message.parsed, wanted);
  same("parse: its keys", Object.keys(wanted), ["city", "days"]);
  const cut = () => client.chat.completions.parse({ model, messages, max_tokens: 2, response_format });
  await raises("parse of what max_tokens cut", LengthFinishReasonError, cut);
  const again = await chat({ messages: [...messages, message, messages[0]] });
  holds("a parsed message goes back in", again.choices[0].message.content, again.choices[0].message.content);
}

async function judgeTools() {
  const tools = [{ type: "function", function: { name: "plan", parameters: schema, strict: true } }];
  const asked = { tools, tool_choice: "required", max_tokens: 120 };
  const choice = (await chat(asked)).choices[0];
  const call = choice.message.tool_calls[0];
  same("tools: finish_reason, name", [choice.finish_reason, call.function.name], ["tool_calls", "plan"]);
  same("tools: arguments", Object.keys(JSON.parse(call.function.arguments)), ["city", "days"]);
  const final = await client.chat.completions.stream({ model, messages, temperature: 0, ...asked }).finalChatCompletion();
  const streamed = final.choices[0].message.tool_calls[0].function;
  same("stream: the call of the whole", [streamed.name, streamed.arguments], [call.function.name, call.function.arguments]);
  let asks = 0;
  const plan = { type: "function", function: { name: "plan", parameters: schema, parse: JSON.parse, function: () => `${(asks += 1)} day` } };
  const named = { type: "function", function: { name: "plan" } };
  const runner = client.chat.completions.runTools({ model, messages, temperature: 0, max_tokens: 120, tools: [plan], tool_choice: named });
  await runner.done();
  same("runTools: the function is called", [asks, runner.messages.at(-1).role], [1, "tool"]);
  const answered = await chat({ messages: [...messages, choice.message, { role: "tool", tool_call_id: call.id, content: "yes" }], tools });
  holds("a call and its answer go back in", answered.choices[0].message.content, answered.choices[0].message.content);
}

async function judgeErrors() {
  const ask = (more, at = client) => at.chat.completions.create({ model, messages, ...greedy, ...more });
  const cases = [
    ["400: out of range", OpenAI.BadRequestError, () => ask({ temperature: -1 }), "invalid_field"],
    ["400: unknown field", OpenAI.BadRequestError, () => ask({ temprature: 1 }), "invalid_field"],
    ["401: another key", OpenAI.AuthenticationError, () => ask({}, client.withOptions({ apiKey: "jsk_no" })), "unauthenticated"],
    ["403: priority", OpenAI.PermissionDeniedError, () => ask({ priority: 5 }, limited), "permission_denied"],
    ["404: another model", OpenAI.NotFoundError, () => ask({ model: "gpt-4" }), "model_not_found"],
    ["504: timeout", OpenAI.InternalServerError, () => ask({ timeout: 1e-3 }), "deadline"],
  ];
  for (const [name, kind, call, code] of cases) same(`${name}: code`, (await raises(name, kind, call))?.code, code);
  await ask({}, limited);
  const error = await raises("429: a quota", OpenAI.RateLimitError, () => ask({}, limited));
  const wait = Number(error.headers.get("retry-after"));
  holds("429: Retry-After", wait > 0 && wait <= 60, wait);
}

async function judgeEnds() {
  const long = { max_tokens: 4000, ignore_eos: true };
  await raises("the client's own timeout", OpenAI.APIConnectionTimeoutError, () => complete(PROMPT, long, { timeout: 1000 }));
  let waited = await idleMs();
  holds("… ends it in the server", waited < IMMEDIATE_MS, `${waited.toFixed()} ms`);
  const stream = await chat({ ...long, stream: true });
  let heard = 0;
  for await (const chunk of stream) if ((heard += chunk.choices.length) > 3) break;
  waited = await idleMs();
  holds("a stream left ends in the server", waited < IMMEDIATE_MS, `${waited.toFixed()} ms`);
  const texts = await Promise.all([1, 2, 3, 4].map(() => complete(PROMPT)));
  same("four at once", new Set(texts.map((reply) => reply.choices[0].text)).size, 1);
}

async function main() {
  const parts = [judgeModels, judgeCompletions, judgeChat, judgeStreams, judgeForms, judgeTools, judgeErrors, judgeEnds];
  for (const part of parts) {
    try {
      await part();
    } catch (error) {
      console.error(error);
      holds(part.name, false, `${error}`);
    }
  }
  console.log(`openai (node) ${require("openai/version").VERSION}: ${rows} checks, ${faults} disagree`);
  process.exit(faults ? 1 : 0);
}
main();
