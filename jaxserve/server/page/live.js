
// ---- the load
const INTERVAL_MS = 1000;
const WINDOW_S = 5; // over which rates and shares are means
const SPARK_POINTS = 60;
const PATIENCE_MS = 10_000;
const KINDS = { serving: "good", starting: "warn", draining: "warn", stopped: "bad", failed: "bad" };

let seen = []; // of the last seconds, oldest first
let rates = []; // output tokens a second, for the line
let timer = 0;

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const oneDigit = (value) => value.toFixed(value < 100 ? 1 : 0);
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");

async function look() {
  clearTimeout(timer);
  if (document.hidden) return; // until it is in view again
  let waitMs = INTERVAL_MS;
  try {
    const response = await ask("/load", { signal: AbortSignal.timeout(PATIENCE_MS) });
    show(await response.json());
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) {
      showStatus("key needed", "warn", true);
      askForKey();
      return; // until there is one
    }
    showStatus(error instanceof Refusal ? `refused (${error.status})` : "no connection", "bad", true);
    seen = [];
    waitMs = 3 * INTERVAL_MS;
  }
  clearTimeout(timer);
  timer = setTimeout(look, waitMs);
}

function show(load) {
  showStatus(load.status, KINDS[load.status], false);
  if (seen.length && load.uptime_s < seen.at(-1).uptime_s) seen = []; // another process
  if (seen.at(-1)?.uptime_s !== load.uptime_s) {
    seen.push(load);
    while (seen.length > 2 && seen[1].uptime_s <= load.uptime_s - WINDOW_S) seen.shift();
  }
  const [first, before] = [seen[0], seen.at(-2) ?? load];
  showRates(load, first);
  showLevels(load);
  showPhases(load, first);
  showBuckets(load, before);
  showFacts(load);
}

function showStatus(text, kind, isStale) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.dataset.kind = kind;
  byId("live").classList.toggle("stale", isStale);
  if (isStale) byId("brief").textContent = "";
}

function showRates(load, first) {
  const seconds = load.uptime_s - first.uptime_s;
  const since = (field) => load.totals[field] - first.totals[field];
  const rate = (field) => (seconds > 0 ? since(field) / seconds : 0);
  set("output-rate", oneDigit(rate("output_tokens")));
  set("output-more", `${number.format(load.totals.output_tokens)} in all`);
  set("prompt-rate", oneDigit(rate("prompt_tokens")));
  set("prompt-more", `${number.format(load.totals.prompt_tokens)} in all`);
  set("rows", since("steps") ? oneDigit(since("rows") / since("steps")) : "–");
  set("rows-more", `of ${load.requests.max_running} · ${oneDigit(rate("steps"))} steps/s`);
  const share = (name) => (load.device_s[name] - first.device_s[name]) / seconds;
  set("device", seconds > 0 ? percent(Math.min(1, share("busy"))) : "–");
  set("device-more", seconds > 0 ? `host gap ${percent(Math.min(1, share("gap")))}` : "");
  set("brief", `${oneDigit(rate("output_tokens"))} tokens/s · ${load.requests.running} running`);
  rates = [...rates, rate("output_tokens")].slice(-SPARK_POINTS);
  const top = Math.max(1, ...rates);
  const offset = SPARK_POINTS - rates.length;
  const points = rates.map((value, index) => `${offset + index},${19 - (18 * value) / top}`);
  byId("spark").firstElementChild.setAttribute("points", points.join(" "));
}

function showLevels({ requests, kv }) {
  set("running", number.format(requests.running));
  set("running-more", `at most ${requests.max_running} rows`);
  set("waiting", number.format(requests.waiting));
  set("waiting-more", `${short.format(requests.waiting_prompt_tokens)} prompt tokens`);
  set("kv", percent(kv.usage));
  set("kv-more", `${short.format(kv.used_tokens)} of ${short.format(kv.total_tokens)} tokens`);
}

function showPhases(load, first) {
  const phases = Object.keys(load.phases_s);
  const seconds = load.uptime_s - first.uptime_s;
  const shares = phases.map((phase) => (load.phases_s[phase] - first.phases_s[phase]) / seconds);
  // an idle time is only known when it ends: it is the rest
  const idle = phases.indexOf("idle");
  const busy = shares.reduce((sum, share, index) => sum + (index === idle ? 0 : share), 0);
  shares[idle] = Math.max(0, 1 - busy);
  fillTable("phases", phases, (row, phase, index) => {
    const share = Math.min(1, shares[index]);
    setCells(row, phase, bar(row, share, phase === "idle" || phase === "wait"), percent(share));
  });
}

function showBuckets(load, before) {
  const ran = load.buckets.filter((bucket) => bucket.steps > 0);
  ran.sort((one, other) => other.real_tokens - one.real_tokens || other.steps - one.steps);
  const stepsBefore = new Map(before.buckets.map((bucket) => [nameOf(bucket), bucket.steps]));
  fillTable("buckets", ran, (row, bucket) => {
    const sum = bucket.real_tokens + bucket.padded_tokens;
    const counts = sum ? [bucket.real_tokens, bucket.padded_tokens] : [];
    const [real, padded] = counts.map((count) => short.format(count));
    const share = bucket.real_tokens / sum;
    row.classList.toggle("ran", bucket.steps > (stepsBefore.get(nameOf(bucket)) ?? 0));
    row.title = sum ? `${percent(share)} of its tokens were real` : "";
    const cell = sum ? bar(row, share, false) : "";
    setCells(row, nameOf(bucket), short.format(bucket.steps), real ?? "", padded ?? "", cell);
  });
  const rest = load.buckets.filter((bucket) => bucket.steps === 0 && hasSteps(bucket)).length;
  set("buckets-more", `${rest} more did not run.`);
}

const nameOf = (bucket) => `${bucket.program === "forward" ? "" : `${bucket.program} `}${bucket.shape}`;
const hasSteps = (bucket) => bucket.program === "forward" || bucket.program === "output";

function showFacts(load) {
  const { programs, requests, totals } = load;
  const late = programs.late ? `, ${programs.late} compiled late` : "";
  set("model", load.model ?? "");
  set("cache", `${programs.from_cache} of ${programs.compiled + programs.from_cache} programs were read from it${late}`);
  set("requests", `${number.format(requests.finished)} ended, ${number.format(requests.refused)} refused`);
  set("preempted", `${number.format(totals.preemptions)} sequences`);
  set("uptime", `${duration(load.uptime_s)} · version ${load.version}`);
}

function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

// ---- what stays as it is is not touched
function set(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function fillTable(id, values, fill) {
  const body = byId(id).tBodies[0];
  while (body.rows.length > values.length) body.lastElementChild.remove();
  values.forEach((value, index) => fill(body.rows[index] ?? body.insertRow(), value, index));
}

function setCells(row, head, ...contents) {
  if (!row.cells.length) {
    const cell = make("th");
    cell.scope = "row";
    row.append(cell, ...contents.map(() => make("td")));
  }
  [head, ...contents].forEach((content, index) => {
    const cell = row.cells[index];
    if (content instanceof Element) {
      if (content.parentElement !== cell) cell.replaceChildren(content);
    } else if (cell.textContent !== content || cell.firstElementChild) {
      cell.textContent = content;
    }
  });
}

/** Returns the row's bar, at this share; the number beside it says the same. */
function bar(row, share, isSoft) {
  const element = row.querySelector(".bar") ?? make("div", { className: "bar" }, make("span", {}, make("i")));
  element.ariaHidden = "true";
  const fill = element.querySelector("i");
  fill.classList.toggle("soft", isSoft);
  fill.style.width = `${100 * (Number.isFinite(share) ? share : 0)}%`;
  return element;
}

document.addEventListener("visibilitychange", () => {
  seen = [];
  look();
});
keyListeners.push(look);
look();
