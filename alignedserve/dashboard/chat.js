/* The chat of the page at /. A chat is {id, at, turns, skipped}; a turn is {role, content}, the assistant's with its
   {thinking} too. `skipped` turns at its beginning are not sent any more: they do not fit the model's context. */

const byId = (id) => document.getElementById(id);
const PATIENCE_MS = 600000; // with a server that is full, from the first try on
const MOST_CHATS = 100, MOST_CHARS = 2e6; // that the browser keeps; the oldest go
const COMPLETION_TOKENS = 256; // of a text that goes on: without a template nothing says where it ends
const CHAT = "alignedserve-chat-", SETTINGS = "alignedserve-settings"; // names in the browser's storage
const OPEN = "alignedserve-open", DRAFT = "alignedserve-draft"; // names in the tab's
const completes = "completes" in byId("talk").dataset; // the model has no chat template

let stop = null; // ends the wait for an answer, or the answer
let asking = null; // the last question, until its end
let pending = ""; // words that have no answer yet
let editing = null; // {at, box}: the turn that is edited, and what the box had before

// --- What the browser keeps

class Forgetful { // where it keeps nothing for this page
  getItem(name) { return this[name] ?? null; }
  setItem(name, value) { this[name] = value; }
  removeItem(name) { delete this[name]; }
}

function storage(name) { try { return window[name]; } catch { return new Forgetful(); } }

const disk = storage("localStorage"), tab = storage("sessionStorage");

function read(name) { try { return JSON.parse(disk.getItem(name)); } catch { return null; } }

const fresh = () => ({id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, at: 0, turns: [], skipped: 0});

/* Return the kept chats, the latest first. */
function chats() {
  const kept = Object.keys(disk).filter((name) => name.startsWith(CHAT)).map(read);
  return kept.filter((chat) => Array.isArray(chat?.turns)).sort((one, other) => other.at - one.at);
}

let current = fresh();

/* Keep the chat, and as many of the latest others as there is room for. */
function keep() {
  if (!current.turns.length) return;
  const sizeOf = (chat) => JSON.stringify(chat).length, others = chats().filter((chat) => chat.id !== current.id);
  let chars = others.reduce((sum, chat) => sum + sizeOf(chat), sizeOf(current));
  for (;;) {
    const isFull = chars > MOST_CHARS || others.length >= MOST_CHATS;
    try {
      if (!isFull || !others.length) return disk.setItem(CHAT + current.id, JSON.stringify(current));
    } catch { /* full, whatever others keep here */ }
    if (!others.length) return tell("This browser has no room for this chat: a reload loses it.");
    chars -= sizeOf(others.at(-1));
    disk.removeItem(CHAT + others.pop().id);
    byId("times").textContent += " The oldest chat that was kept made room for this one.";
  }
}

function leave() {
  keep();
  try {
    tab.setItem(DRAFT, [pending, byId("words").value].filter(Boolean).join("\n"));
    tab.setItem(OPEN, current.id);
  } catch { /* full */ }
}

// --- The server

function headers() {
  const key = byId("key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

async function look() {
  let state = "does not answer";
  try { state = (await fetch("ready")).ok ? "ready" : "not ready yet"; } catch { /* said below */ }
  byId("state").textContent = state;
  byId("state").className = "pill " + (state === "ready" ? "good" : "bad");
  if (state === "ready" && !byId("model").options.length) await models();
}

async function models() {
  const answer = await fetch("v1/models", {headers: headers()});
  byId("key-row").hidden = answer.status !== 401 && answer.status !== 403 && !byId("key").value;
  if (!answer.ok) return;
  const all = (await answer.json()).data, writers = all.filter((model) => model.promise !== null); // others make vectors
  byId("model").replaceChildren(...(writers.length ? writers : all).map((model) => new Option(model.id)));
  curl();
}

/* Return the route and body that ask for an answer to these turns. */
function call(turns) {
  const model = byId("model").value || "MODEL";
  if (!completes) return ["v1/chat/completions", {model, messages: turns}];
  return ["v1/completions", {model, prompt: turns.at(-1).content, max_tokens: COMPLETION_TOKENS}];
}

function curl() {
  const base = location.href.replace(/[?#].*/, "").replace(/\/$/, "");
  const key = byId("key-row").hidden ? "" : " -H \"Authorization: Bearer $ALIGNEDSERVE_SERVER_API_KEY\"";
  const [route, body] = call([{role: "user", content: completes ? byId("words").placeholder : "Name three planets."}]);
  const sent = `-H 'Content-Type: application/json'${key} \\\n  -d '${JSON.stringify(body)}'`;
  byId("curl").textContent = `curl ${base}/${route} ${sent}`;
}

/* Wait before the next try, and count down in the answer's place; Cancel ends that. */
async function countDown(place, said, pause, signal) {
  const left = make("span"), end = performance.now() + pause;
  left.ariaLive = "off"; // who hears the page is told once
  place.replaceChildren(left, said);
  for (let ms = pause; ms > 0; ms = end - performance.now()) {
    following(() => { left.textContent = `Asked again in ${Math.ceil(ms / 1000)} s: `; });
    await new Promise((go) => {
      setTimeout(go, Math.min(ms, 1000));
      signal.addEventListener("abort", go, {once: true});
    });
    signal.throwIfAborted();
  }
  place.textContent = "…";
}

async function complaint(answer) {
  try { return (await answer.json()).error.message; } catch { return `the server answers with ${answer.status}`; }
}

/* Return in how many ms the server wants to be asked again; null where it does not, or patience ends before. */
function pauseOf(answer, began) {
  const told = answer.headers.get("retry-after"), pause = 1000 * Math.max(1, told);
  const isFull = [429, 503].includes(answer.status) && answer.headers.get("x-should-retry") !== "false";
  return isFull && told !== null && performance.now() - began + pause < PATIENCE_MS ? pause : null;
}

/* Return the answer that begins, and how many turns were left out. A server that is full is asked again when it says;
   where the context is full, the oldest turns are forgotten. */
async function answered(turns, skipped, place, signal) {
  const began = performance.now(), system = settings.system ? [{role: "system", content: settings.system}] : [];
  const options = {stream: true, stream_options: {include_usage: true}};
  if (settings.temperature !== null) options.temperature = settings.temperature;
  for (let retries = 0;;) {
    const said = turns.slice(skipped).map(({role, content}) => ({role, content}));
    const [route, body] = call([...system, ...said]);
    const answer = await fetch(route, {
      method: "POST", signal, body: JSON.stringify({...body, ...options}),
      headers: {...headers(), "X-Stainless-Retry-Count": retries}, // who comes again may wait longer in line
    });
    if (answer.ok) return {answer, skipped};
    const message = await complaint(answer), pause = pauseOf(answer, began);
    if (pause !== null) {
      await countDown(place, message, pause, signal);
      retries++;
    } else if (message.includes("maximum context length") && said.length > 1 && !completes) skipped += 2;
    else throw new Error(message);
  }
}

/* Yield the place in line and the events of an answer. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let left = "", got = await reader.read(); !got.done; got = await reader.read()) {
    const lines = (left + got.value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      const waits = /^: (\d+ before you, about \d+ s)$/.exec(line)?.[1];
      const event = line.startsWith("data: {") ? JSON.parse(line.slice(6)) : {waits};
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// --- A question and its answer, as they are seen

const articles = () => [...document.querySelectorAll("#chat article")];

function tell(text) {
  byId("chat").append(Object.assign(make("div", "bad", text), {role: "alert"}));
  byId("chat").scrollTop = byId("chat").scrollHeight;
}

/* Do what lengthens the chat, and stay at its end where one is there. */
function following(change) {
  const log = byId("chat"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

class Exchange {
  #thinks = performance.now();

  constructor(words) {
    this.place = make("div", "assistant soft", "…");
    this.thoughts = make("pre");
    this.thinking = make("details", "thinking", make("summary", "", "Thoughts"), this.thoughts);
    this.thinking.hidden = true;
    const asked = make("div", "asked", button("edit", "✎", "Edit the question"), make("div", "user", words));
    const again = button("retry", "Retry", "Ask again");
    const tools = make("div", "tools", button("copy", "Copy", "Copy the answer"), again);
    this.article = make("article", "", asked, this.thinking, this.place, tools);
    byId("chat").append(this.article);
    this.writing = new Writing(this.place, completes, following);
    this.musing = new Writing(this.thoughts, true, (change) => {
      following(change);
      this.thoughts.scrollTop = this.thoughts.scrollHeight;
    });
  }

  think(piece) {
    if (this.thinking.hidden) {
      this.thinking.hidden = false;
      this.thinking.open = this.article.ariaBusy === "true";
      if (this.thinking.open) this.thinking.firstChild.textContent = "Thinking …";
    }
    this.musing.add(piece);
  }

  write(piece) {
    if (this.place.classList.contains("soft")) {
      this.place.className = completes ? "assistant plain" : "assistant";
      this.place.replaceChildren();
      this.#fold();
    }
    this.writing.add(piece);
  }

  #fold() {
    this.musing.show();
    if (!this.thinking.open) return;
    this.thinking.open = false;
    this.thinking.firstChild.textContent = `Thought for ${((performance.now() - this.#thinks) / 1000).toFixed(1)} s`;
  }

  end() {
    if (this.place.classList.contains("soft")) {
      this.#fold();
      this.place.replaceChildren();
    } else this.writing.show();
    following(() => { this.article.ariaBusy = "false"; });
  }
}

function show() {
  byId("chat").replaceChildren();
  byId("times").textContent = "";
  for (let at = 0; at < current.turns.length; at += 2) {
    const exchange = new Exchange(current.turns[at].content), {content, thinking} = current.turns[at + 1];
    if (thinking) exchange.think(thinking);
    if (content) exchange.write(content);
    exchange.end();
  }
  byId("chat").scrollTop = byId("chat").scrollHeight;
}

// --- Asking

/* Ask, and show the answer as it comes, until then how long it waits. Return whether it began: then it has taken the
   place of the turns from `at` on, which are hidden before. */
async function ask(words, at) {
  const turns = [...current.turns.slice(0, at), {role: "user", content: words}], began = performance.now();
  const answer = {role: "assistant", content: "", thinking: ""}, old = articles().slice(at / 2);
  let first = 0, used = null, finish = null, skipped = Math.min(current.skipped, at);
  for (const gone of document.querySelectorAll("#chat .bad")) gone.remove();
  for (const article of old) article.hidden = true;
  const exchange = new Exchange(words);
  byId("talk").scrollIntoView({block: "nearest"});
  byId("chat").scrollTop = byId("chat").scrollHeight;
  const begin = () => {
    first = performance.now();
    for (const article of old) article.remove();
    current = {...current, at: Date.now(), turns: [...turns, answer], skipped};
    pending = "";
    exchange.article.ariaBusy = "true"; // who hears the page hears the answer when it is whole
    byId("send").textContent = "Stop";
  };
  stop = new AbortController();
  try {
    const begun = await answered(turns, skipped, exchange.place, stop.signal);
    skipped = begun.skipped;
    for await (const event of eventsOf(begun.answer)) {
      if (event.waits && !first) exchange.place.textContent = event.waits;
      used = event.usage || used;
      const {delta = {}, text, finish_reason: end} = event.choices?.[0] ?? {};
      const thought = delta.reasoning_content ?? delta.reasoning ?? "", piece = delta.content ?? text ?? "";
      finish = end ?? finish;
      if (!first && (thought || piece)) begin();
      if (thought) exchange.think(thought);
      if (piece) exchange.write(piece);
      answer.thinking += thought;
      answer.content += piece;
    }
    if (!first) throw new Error("no words came as an answer");
  } catch (error) {
    if (error.name !== "AbortError") tell(error.message);
  }
  if (first) {
    byId("times").textContent = times(first - began, performance.now() - first, used ?? {}, finish, skipped);
    exchange.end();
  } else {
    exchange.article.remove();
    for (const article of old) article.hidden = false;
  }
  stop = null;
  byId("send").textContent = "Send";
  keep();
  return first > 0;
}

/* Return what an answer took; of what its server does not count, nothing. */
function times(first_ms, rest_ms, {completion_tokens: tokens, total_tokens: context}, finish, skipped) {
  const rate = tokens && `, ${tokens} tokens, ${(tokens / Math.max(0.001, rest_ms / 1000)).toFixed(0)} tokens/s`;
  return [
    `first token after ${Math.round(first_ms)} ms${rate || ""}`,
    context && `${context} tokens of context`,
    finish === "length" && "cut: it has as many tokens as it may have",
    skipped && "the oldest turns are forgotten",
  ].filter(Boolean).join("; ");
}

/* Ask what is in the box. Words that get no answer go back into it, before what was typed meanwhile. */
async function send() {
  const words = byId("words").value.trim(), edited = editing;
  if (!words) return;
  byId("words").value = "";
  byId("editing").hidden = true;
  byId("send").textContent = "Cancel";
  pending = words;
  if (await ask(words, edited?.at ?? current.turns.length)) {
    if (edited) endEditing();
  } else {
    byId("words").value = [words, byId("words").value].filter(Boolean).join("\n");
    byId("editing").hidden = !editing;
    pending = "";
  }
}

async function halt() {
  stop?.abort();
  await asking;
}

/* Put back what the box had before, and behind it words that were changed and not sent. */
function endEditing() {
  const typed = byId("words").value, isChanged = typed !== current.turns[editing.at].content;
  byId("words").value = [editing.box, isChanged ? typed : ""].filter(Boolean).join("\n");
  editing = null;
  byId("editing").hidden = true;
  for (const article of document.querySelectorAll("#chat .old")) article.classList.remove("old");
}

async function edit(article) {
  await halt();
  const at = 2 * articles().indexOf(article);
  if (at < 0) return; // it got no answer, and its words are in the box
  if (editing) endEditing();
  editing = {at, box: byId("words").value};
  for (const old of articles().slice(at / 2)) old.classList.add("old");
  byId("words").value = current.turns[at].content;
  byId("editing").hidden = false;
  byId("words").focus();
}

async function retry() {
  await halt();
  const at = current.turns.length - 2;
  if (at < 0) return;
  byId("send").textContent = "Cancel";
  asking = ask(current.turns[at].content, at);
}

async function turnTo(chat) {
  await halt();
  if (editing) endEditing();
  keep();
  current = chat;
  show();
  byId("words").focus();
}

// --- Copying, settings and kept chats

/* Copy a text; also without https, where there is no navigator.clipboard. */
function copy(text, from) {
  const area = make("textarea", "away"), said = (from.dataset.says ??= from.textContent);
  area.value = text;
  from.after(area);
  area.select();
  from.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
  area.remove();
  from.focus();
  setTimeout(() => { from.textContent = said; }, 2000);
}

const settings = {system: "", temperature: null, ...read(SETTINGS)};

function showSettings() {
  if (!completes) byId("system").value = settings.system;
  byId("temperature").value = settings.temperature ?? "";
  nameSettings();
}

function nameSettings() {
  const isSet = (settings.system && !completes) || settings.temperature !== null;
  byId("settings-open").textContent = isSet ? "Settings: yours" : "Settings";
}

function changeSettings() {
  const temperature = byId("temperature");
  if (!temperature.reportValidity()) return;
  if (!completes) settings.system = byId("system").value.trim();
  settings.temperature = temperature.value === "" ? null : temperature.valueAsNumber;
  nameSettings();
  try { disk.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* it counts until the page is left */ }
}

function showPast() {
  const kept = chats();
  byId("past").querySelector("ul").replaceChildren(...kept.map((chat) => {
    const title = chat.turns[0].content.slice(0, 80), when = new Date(chat.at).toLocaleString();
    const open = button("open", title, `Open the chat: ${title}`);
    const gone = button("delete", "Delete", `Delete the chat: ${title}`);
    open.addEventListener("click", () => { byId("past").close(); turnTo(chat); });
    gone.addEventListener("click", async () => { await forget([chat]); showPast(); });
    return make("li", chat.id === current.id ? "now" : "", open, make("span", "soft", when), gone);
  }));
  byId("delete-all").textContent = "Delete all";
  byId("delete-all").hidden = !kept.length;
  if (!kept.length) byId("past").querySelector("ul").append(make("li", "soft", "None yet."));
}

async function forget(gone) {
  if (gone.some((chat) => chat.id === current.id)) {
    await halt();
    current = fresh();
    show();
  }
  for (const chat of gone) disk.removeItem(CHAT + chat.id);
}

// --- What one clicks and types

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stop) return stop.abort();
  asking = send();
});
byId("words").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!stop) byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (stop) stop.abort();
  else if (editing) byId("keep").click();
});
byId("chat").addEventListener("click", (event) => {
  const clicked = event.target, article = clicked.closest("article"), block = clicked.closest(".code");
  if (clicked.matches(".edit")) edit(article);
  else if (clicked.matches(".retry")) retry();
  else if (clicked.matches(".code .copy")) copy(block.querySelector("code").textContent, clicked);
  else if (clicked.matches(".copy")) copy(current.turns[2 * articles().indexOf(article) + 1].content, clicked);
});
byId("keep").addEventListener("click", () => {
  byId("words").value = "";
  endEditing();
  byId("words").focus();
});
byId("anew").addEventListener("click", () => turnTo(fresh()));
byId("past-open").addEventListener("click", () => { keep(); showPast(); byId("past").showModal(); });
byId("delete-all").addEventListener("click", async (event) => {
  if (event.target.textContent === "Delete all") event.target.textContent = "Delete all: sure?";
  else { await forget(chats()); showPast(); }
});
byId("settings-open").addEventListener("click", () => { showSettings(); byId("settings").showModal(); });
byId("settings").addEventListener("input", changeSettings);
byId("key").addEventListener("change", () => { byId("model").replaceChildren(); models(); });
byId("model").addEventListener("change", curl);
byId("copy").addEventListener("click", () => copy(byId("curl").textContent, byId("copy")));
for (const name of ["pagehide", "visibilitychange"]) addEventListener(name, leave);

current = chats().find((chat) => chat.id === tab.getItem(OPEN)) ?? current;
byId("words").value = tab.getItem(DRAFT) ?? "";
show();
showSettings();
curl();
look();
setInterval(look, 5000);
