"use strict";
// A client like any other: it streams /v1/chat/completions and draws /timeline. No text of a message is stored anywhere.

const $ = (id) => document.getElementById(id);
const history = [];          // of the conversation: {role, content}
const mine = new Set();      // request ids of this page
const ours = (id) => mine.has(id.split("~")[0]);  // the engine's id of a request is its id with a fresh end
const steps = [];            // the newest of the scheduler's steps
const COLUMNS = 112, POLL_MS = 400;
let seen = 0, running = null, best = null;

const headers = () => {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
};
const ms = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(2)} s`);
const now = () => performance.now() / 1000;
const newId = () => "page-" + Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");

// One answer --------------------------------------------------------------------------------------------

class Stamps {
  // What was stamped is pieces of text: a token that ends an answer, or half a character, sends none. So the rate is of
  // pieces; the count is the server's as soon as it has told it.
  constructor() { this.sent = now(); this.first = null; this.last = null; this.gaps = []; this.pieces = 0; this.tokens = null; this.end = null; }
  piece() {
    const t = now();
    if (this.first === null) this.first = t; else this.gaps.push(t - this.last);
    this.last = t;
    this.pieces += 1;
  }
  get ttft() { return this.first === null ? null : this.first - this.sent; }
  get rate() { return this.pieces > 1 && this.last > this.first ? (this.pieces - 1) / (this.last - this.first) : null; }
  get median() { const g = [...this.gaps].sort((a, b) => a - b); return g.length ? g[Math.floor(g.length / 2)] : null; }
  show() {
    $("ttft").textContent = ms(this.ttft);
    $("rate").textContent = this.rate === null ? "–" : this.rate.toFixed(1);
    $("itl50").textContent = ms(this.median);
    $("itlmax").textContent = this.gaps.length ? ms(Math.max(...this.gaps)) : "–";
    $("count").textContent = this.tokens ?? this.pieces;
    $("e2e").textContent = this.end === null ? "…" : ms(this.end - this.sent);
  }
}

function bubble(role, text) {
  const div = document.createElement("div");
  div.className = `message ${role}`;
  div.append(document.createTextNode(text));
  $("messages").append(div);
  $("messages").scrollTop = $("messages").scrollHeight;
  return div;
}

// Server-sent events as WHATWG HTML defines them, as far as this server sends them: data lines, ended by a blank line.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    let at;
    while ((at = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, at).split("\n").filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      rest = rest.slice(at + 2);
      if (data) yield data;
    }
  }
}

async function ask(messages, signal, onPiece) {
  const id = newId();
  mine.add(id);
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal,
    headers: { "Content-Type": "application/json", "X-Request-Id": id, ...headers() },
    body: JSON.stringify({
      messages, stream: true, stream_options: { include_usage: true },
      temperature: Number($("temperature").value), max_tokens: Number($("max_tokens").value),
    }),
  });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    const wait = response.headers.get("Retry-After");
    throw new Error(`${response.status}: ${body.error ? body.error.message : response.statusText}${wait ? ` (try again in ${wait} s)` : ""}`);
  }
  let ended = false, usage = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") { ended = true; break; }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    for (const choice of chunk.choices) if (choice.delta.content) onPiece(choice.delta.content);
  }
  if (!ended) throw new Error("the stream ended before its last event");
  return usage;
}

async function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  bubble("user", text);
  history.push({ role: "user", content: text });
  const abort = (running = new AbortController());
  $("send").disabled = true;
  $("stop").disabled = false;
  const copies = Math.max(1, Math.min(16, Number($("streams").value) || 1));
  const jobs = [];
  for (let i = 1; i < copies; i++) jobs.push(ask([...history], abort.signal, () => {}).catch(() => {}));
  const box = bubble("assistant", "");
  const stamps = new Stamps();
  let answer = "", failed = null, usage = null;
  stamps.show();
  try {
    usage = await ask([...history], abort.signal, (piece) => {
      answer += piece;
      stamps.piece();
      box.firstChild.nodeValue = answer;
      stamps.show();
      $("messages").scrollTop = $("messages").scrollHeight;
    });
  } catch (error) {
    failed = error.name === "AbortError" ? "stopped: the server has freed what it held" : error.message;
  }
  stamps.end = now();
  if (usage) stamps.tokens = usage.completion_tokens;
  stamps.show();
  await Promise.allSettled(jobs);
  history.push({ role: "assistant", content: answer });
  const note = document.createElement("small");
  const cached = usage && usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
  note.textContent = failed ?? `${usage.prompt_tokens} tokens in (${cached} cached), ${usage.completion_tokens} out, first after ${ms(stamps.ttft)}, ${ms(stamps.end - stamps.sent)} in all`;
  if (failed && !answer) { history.splice(-2); box.classList.add("error"); }
  box.append(note);
  $("messages").scrollTop = $("messages").scrollHeight;
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  $("text").focus();
}

// The scheduler -------------------------------------------------------------------------------------------

const OTHERS = "(others)";  // no id: ids have no brackets. Of other keys' requests the server tells the number only
const drawn = (step) => (step.others ? [...step.rows, [OTHERS, 0]] : step.rows);

function draw() {
  const canvas = $("timeline"), g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = 260;
  if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = height * scale; canvas.style.height = `${height}px`; }
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  const shown = steps.slice(-COLUMNS), rows = new Map();
  for (const s of shown) for (const [id] of drawn(s)) if (!rows.has(id)) rows.set(id, rows.size);
  const left = 8, top = 18, each = Math.max(4, Math.min(18, (height - top - 8) / Math.max(1, rows.size))), column = (width - 2 * left) / COLUMNS;
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = colour("--soft");
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  g.fillText(shown.length ? `${count(rows.size - rows.has(OTHERS), "request")} in the last ${count(shown.length, "step")}` : "no step yet", left, 12);
  shown.forEach((s, i) => {
    const x = left + (COLUMNS - shown.length + i) * column;
    for (const [id, fresh] of drawn(s)) {
      const y = top + rows.get(id) * each;
      if (y + each > height) continue;
      g.fillStyle = colour(id === OTHERS ? "--soft" : fresh > 1 ? "--prefill" : "--decode");
      g.fillRect(x, y, Math.max(1, column - 1), each - 2);
      if (ours(id)) { g.fillStyle = colour("--mine"); g.fillRect(x, y + each - 3, Math.max(1, column - 1), 2); }
    }
  });
}

async function poll() {
  try {
    if (!document.hidden) {
      const response = await fetch(`timeline?since=${seen}`, { headers: headers() });
      if (response.status === 401) throw new Error("this server needs an API key");
      if (!response.ok) throw new Error(`the server says ${response.status}`);
      const body = await response.json();
      if (body.next < seen) steps.length = 0;
      seen = body.next;
      steps.push(...body.steps);
      steps.splice(0, Math.max(0, steps.length - 4 * COLUMNS));
      const last = steps[steps.length - 1];
      if (last) {
        $("running").textContent = body.steps.length ? last.running : 0;
        $("waiting").textContent = body.steps.length ? last.waiting : 0;
        $("step").textContent = ms(last.seconds);
        if (last.free !== undefined) {
          const all = last.free + last.cached + last.live;
          $("kv").textContent = `${Math.round((100 * last.live) / all)} % / ${Math.round((100 * last.cached) / all)} %`;
        }
      }
      draw();
      if (!best) await hello();
    }
  } catch (error) {
    best = null;
    status(error.message.includes("fetch") ? "the server does not answer" : error.message, "bad");
  }
  setTimeout(poll, POLL_MS);
}

function status(text, kind) {
  $("state").textContent = text;
  $("state").className = kind;
}

async function hello() {
  const models = await (await fetch("v1/models", { headers: headers() })).json();
  if (!models.data) return;
  best = models.data[0];
  $("model").textContent = `${best.id}, context ${best.max_model_len}`;
  const ready = await fetch("ready");
  status(ready.ok ? "ready" : "not ready", ready.ok ? "ready" : "bad");
  if (!ready.ok) best = null;
}

$("key").value = sessionStorage.getItem("key") || "";
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value.trim()); best = null; });
$("form").addEventListener("submit", (e) => { e.preventDefault(); send(); });
$("text").addEventListener("keydown", (e) => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); } });
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => { if (!running) { history.length = 0; $("messages").replaceChildren(); } });
poll();
