
// ---- the conversation
let history = []; // as the API takes it, without the system prompt
let answering = null; // the AbortController of an answer that is coming

/** A turn in the conversation's view; what a model says comes in pieces. */
class Turn {
  constructor(kind, name) {
    this.texts = new Map(); // of each part: its text node
    this.element = make("article", { className: kind }, make("h3", { text: name }));
    byId("empty").hidden = true;
    keepingEnd(() => byId("log").append(this.element));
  }

  add(text) {
    this.append("text", text, () => {
      const node = document.createTextNode("");
      this.element.append(make("p", { className: "text" }, node));
      return node;
    });
  }

  addReasoning(text) {
    this.append("reasoning", text, () => this.fold("reasoning", "Reasoning"));
  }

  addCall(index, name, text) {
    this.append(`call ${index}`, text, () => this.fold("call", `Tool call: ${name}`));
  }

  fold(kind, title) {
    const node = document.createTextNode("");
    const body = make("pre", {}, node);
    this.element.append(make("details", { className: kind }, make("summary", { text: title }), body));
    return node;
  }

  append(part, text, open) {
    keepingEnd(() => {
      if (!this.texts.has(part)) this.texts.set(part, open());
      this.texts.get(part).appendData(text);
    });
  }

  note(text, className = "note") {
    keepingEnd(() => this.element.append(make("p", { className, text })));
  }
}

/** Shows the conversation's end after a change, where it was in view before. */
function keepingEnd(change) {
  const log = byId("log");
  const wasAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (wasAtEnd) log.scrollTop = log.scrollHeight;
}

/** What the model has said so far in answer to a request. */
class Answer {
  constructor() {
    this.turn = new Turn("assistant", "Assistant");
    this.turn.element.ariaBusy = "true";
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.finish = null;
    this.usage = null;
    this.begunMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.calls.length;
  }

  push(chunk) {
    if (chunk.error) throw new Refusal(0, chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      this.finish = choice.finish_reason ?? this.finish;
      this.pushDelta(choice.delta);
    }
  }

  pushDelta(delta) {
    if (!delta.content && !delta.reasoning_content && !delta.tool_calls) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    if (delta.reasoning_content) {
      this.reasoning += delta.reasoning_content;
      this.turn.addReasoning(delta.reasoning_content);
    }
    if (delta.content) {
      this.text += delta.content;
      this.turn.add(delta.content);
    }
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= {
        id: part.id, type: "function", function: { name: part.function.name, arguments: "" },
      });
      call.function.arguments += part.function.arguments ?? "";
      this.turn.addCall(part.index, call.function.name, part.function.arguments ?? "");
    }
  }

  /** Ends its turn; calls of tools count only where they are whole. */
  end({ isWhole }) {
    this.turn.element.ariaBusy = "false";
    const calls = isWhole ? this.calls : [];
    if (!this.text && !calls.length) return null;
    const message = { role: "assistant", content: this.text };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (calls.length) message.tool_calls = calls;
    return message;
  }

  describe() {
    const facts = [];
    if (this.finish === "length") facts.push("cut at the limit of tokens");
    if (this.usage) facts.push(`${this.usage.prompt_tokens} + ${this.usage.completion_tokens} tokens`);
    if (this.firstMs !== null) {
      facts.push(`first after ${((this.firstMs - this.begunMs) / 1000).toFixed(2)} s`);
      const tokens = (this.usage?.completion_tokens ?? 0) - 1;
      const seconds = (this.lastMs - this.firstMs) / 1000;
      if (tokens > 0 && seconds > 0) facts.push(`${(tokens / seconds).toFixed(1)} tokens/s`);
    }
    return facts.join(" · ");
  }
}

/** Returns a request's body.
 * Throws an Error in words where a setting is wrong. */
function buildBody() {
  const system = byId("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [id, field] of [["temperature", "temperature"], ["max-tokens", "max_tokens"]]) {
    const input = byId(id);
    if (!input.checkValidity()) throw settingError(input, `${labelOf(input)}: ${input.validationMessage}`);
    if (input.value) body[field] = Number(input.value);
  }
  const tools = byId("tools");
  if (tools.value.trim()) {
    try {
      body.tools = JSON.parse(tools.value);
    } catch (error) {
      throw settingError(tools, `Tools are not JSON: ${error.message}`);
    }
  }
  return body;
}

function labelOf(input) {
  return input.labels[0].textContent;
}

function settingError(input, message) {
  byId("settings").open = true;
  input.focus();
  return new Error(message);
}

/** Returns the tool calls of the last answer that have no result yet. */
function openCalls() {
  const last = history.findLastIndex((message) => message.role === "assistant");
  const answered = history.slice(last + 1).map((message) => message.tool_call_id);
  return (history[last]?.tool_calls ?? []).filter((call) => !answered.includes(call.id));
}

async function submit() {
  const field = byId("ask");
  const text = field.value;
  if (answering || !text.trim()) return;
  const [call] = openCalls();
  const before = history;
  const message = call
    ? { role: "tool", tool_call_id: call.id, content: text }
    : { role: "user", content: text };
  history = [...history, message];
  let body;
  try {
    body = buildBody();
  } catch (error) {
    history = before;
    showWrong(error.message);
    return;
  }
  showWrong("");
  field.value = "";
  const turn = new Turn("user", call ? `Result of ${call.function.name}` : "You");
  turn.add(text);
  byId("log").scrollTop = byId("log").scrollHeight;
  if (!openCalls().length) {
    const isAnswered = await answer(body);
    if (!isAnswered) {
      history = before; // the next turn follows what was answered
      turn.note("not answered");
      field.value ||= text;
    }
  }
  showComposer();
}

/** Has the model answer; returns whether there is an answer, or a part of one, to go on from. */
async function answer(body) {
  answering = new AbortController();
  showComposer();
  say("The answer is coming.");
  const reply = new Answer();
  let trouble = "";
  try {
    const response = await ask("/v1/chat/completions", { body, signal: answering.signal });
    trouble = await readAnswer(response, reply);
  } catch (error) {
    trouble = answering.signal.aborted ? "stopped" : explain(error);
    if (error instanceof Refusal && error.status === 401) askForKey();
  }
  const isStopped = answering.signal.aborted;
  answering = null;
  const message = reply.end({ isWhole: !trouble });
  if (message) history = [...history, message];
  if (trouble) reply.turn.note(trouble, isStopped ? "note" : "wrong");
  const facts = reply.describe();
  if (facts) reply.turn.note(facts);
  say(`${trouble ? `${isStopped ? "Stopped" : trouble}. ` : ""}${reply.text}`);
  return message !== null || !trouble;
}

/** Reads an answer to its end; returns what was wrong with the end, empty where nothing was. */
async function readAnswer(response, reply) {
  for await (const event of readEvents(response)) {
    if (event === "[DONE]") return "";
    reply.push(JSON.parse(event));
  }
  return "The answer broke off: the connection to the server was lost.";
}

function stop() {
  answering?.abort();
  byId("ask").focus();
}

function showComposer() {
  const isBusy = answering !== null;
  const [call] = openCalls();
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("ask-label").textContent = call && !isBusy ? `Result of ${call.function.name}` : "Message";
}

function showWrong(text) {
  byId("wrong").textContent = text;
  byId("wrong").hidden = !text;
}

/** For who listens: a whole answer at once, not its pieces. */
function say(text) {
  byId("said").textContent = text;
}

byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("ask").focus(); // before the button is disabled and loses it
  submit();
});
byId("ask").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && answering) stop();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => {
  answering?.abort();
  history = [];
  for (const turn of byId("log").querySelectorAll("article")) turn.remove();
  byId("empty").hidden = false;
  showWrong("");
  showComposer();
  say("A new chat.");
  byId("ask").focus();
});
