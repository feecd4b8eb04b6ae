
// ---- this server's API. Texts of others are only ever set as text, never as markup.
const byId = (id) => document.getElementById(id);

let apiKey = ""; // nowhere else: it is gone with the page
const keyListeners = [];

class Refusal extends Error {
  constructor(status, message, waitS = null) {
    super(message);
    this.status = status;
    this.waitS = waitS;
  }
}

async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (!response.ok) throw await readRefusal(response);
  return response;
}

async function readRefusal(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    // not ours: something between here and the server answered
  }
  const wait = Number(response.headers.get("retry-after"));
  return new Refusal(response.status, String(message || `status ${response.status}`), wait || null);
}

/** What went wrong, in words for whoever sits before the page. */
function explain(error) {
  if (!(error instanceof Refusal)) {
    if (error instanceof TypeError) return "The server cannot be reached. Is it still running?";
    return error.message || String(error);
  }
  const again = error.waitS ? ` Try again in ${error.waitS} s.` : "";
  const told = sentence(error.message);
  switch (error.status) {
    case 401:
      return "The server did not take the API key. Enter a valid one above.";
    case 403:
      return `This is not allowed with this key. ${told}`;
    case 429:
      return `The server has no room right now. ${told}${again}`;
    case 503:
      return `The server takes no requests right now. ${told}${again}`;
    case 504:
      return `The request waited too long. ${told}`;
    default:
      return error.status >= 500 ? `The server failed. ${told}` : told;
  }
}

function sentence(text) {
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

/** The data of server-sent events, one by one. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}

function make(tag, { className = "", text = "" } = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  element.append(...children);
  return element;
}

// ---- the key
function askForKey() {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").focus();
}

function useKey(key) {
  apiKey = key;
  byId("key").value = "";
  byId("key-kept").hidden = !key;
  byId("key-form").hidden = Boolean(key);
  for (const listener of keyListeners) listener();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  const isPlain = /^[\x21-\x7e]+$/.test(key);
  byId("key").setCustomValidity(isPlain ? "" : "A key has letters, digits and signs only.");
  if (!byId("key-form").reportValidity()) return;
  useKey(key);
  byId("ask").focus();
});
byId("key").addEventListener("input", () => byId("key").setCustomValidity(""));
byId("forget").addEventListener("click", () => {
  useKey("");
  askForKey();
});
