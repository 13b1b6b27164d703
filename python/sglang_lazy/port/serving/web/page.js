"use strict";
const PERIOD = 20; // seconds, of the history
const PAUSE = 1000, PATIENCE = 3000; // milliseconds between two requests, after an answer and after an error

let survey = null; // the last answer
let received = 0; // when it came, in milliseconds of this browser's clock
let turn = 0; // grows with each request, so that late answers to former ones are left alone
let paused = false;
let opened = null; // what the dialog shows: the id of a chunk, and whose it is
let cursor = null; // of the list's next page

// Elements

const $ = id => document.getElementById(id);
const IN_SVG = new Set(["svg", "g", "a", "title", "path", "rect", "circle", "line", "text"]);

// What comes from the server becomes text, never HTML.
function element(tag, attributes = {}, ...children) {
  const namespace = IN_SVG.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// As many children as items, updated in place, so that neither focus nor a click under way is lost.
function fill(parent, items, make, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, i) => update(parent.children[i] || parent.appendChild(make()), item));
}

// A click on `node` shows this chunk.  salt: whose it is, null for the shared one.
function leadTo(node, id, salt) {
  node.dataset.chunk = id;
  node.dataset.salt = salt || "";
  return node;
}

// Words and numbers

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1});
const plural = (n, one) => `${whole.format(n)} ${one}${n === 1 ? "" : "s"}`;
const brief = id => `${id.slice(0, 8)}…`;

function percent(part, all) {
  if (!all) return "–";
  const share = 100 * part / all;
  if (share > 0 && share < .1) return "<0.1%";
  if (share > 99.9 && share < 100) return ">99.9%";
  return `${share.toFixed(share % 100 && Math.abs(share - 50) > 49 ? 1 : 0)}%`;
}

function ago(time) {
  const now = survey.time + (performance.now() - received) / 1000;
  const seconds = Math.max(0, Math.round(now - time));
  if (seconds < 100) return `${seconds} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

function colour(id) {
  const hue = Math.round(parseInt(id.slice(0, 4), 16) * 360 / 65536), shade = parseInt(id[4], 16) % 3 - 1;
  return `oklch(calc(var(--light) + ${shade * .09}) ${.13 + shade * .02} ${hue})`;
}

function swatch(id) {
  const made = element("span", {class: "swatch"});
  made.style.background = colour(id);
  return made;
}

// The server

async function ask(path, query = {}) {
  const all = {cache_salt: $("salt").value, all: $("all").checked || "", ...query};
  const given = new URLSearchParams(Object.entries(all).filter(([, value]) => value !== ""));
  const key = sessionStorage.getItem("key");
  const answer = await fetch(`${path}?${given}`, {headers: key ? {Authorization: `Bearer ${key}`} : {}});
  const body = await answer.json();
  if (answer.ok) return body;
  throw Object.assign(new Error(body.detail || body.error || answer.statusText), {status: answer.status});
}

function complain(error) {
  if (!error.status) console.error(error);
  const keyless = error.status === 401;
  $("key").hidden = !keyless;
  $("message").hidden = keyless;
  $("message").textContent = error.status ? error.message : "The server does not answer; trying again.";
  $("status").textContent = keyless ? "locked" : error.status ? "refused" : "no connection";
  $("numbers").hidden = keyless || !survey;
}

async function poll() {
  const mine = ++turn;
  let pause = PAUSE;
  if (!paused && !document.hidden) {
    try {
      const answer = await ask("lazy/survey");
      if (mine !== turn) return;
      [survey, received] = [answer, performance.now()];
      $("message").hidden = $("key").hidden = true;
      $("numbers").hidden = false;
      show();
      if (opened) await showChunk();
    } catch (error) {
      if (mine !== turn) return;
      complain(error);
      pause = PATIENCE;
    }
  }
  setTimeout(() => mine === turn && poll(), pause);
}

// What is seen all the time

function show() {
  const {chunks, memory, history, prompts} = survey;
  const cached = chunks.resident.chunks + chunks.host.chunks;
  const [, asked, references, hits] = sums(history, 300), [, , , , tokens, reused] = sums(history, 3600);
  for (const [id, text] of Object.entries({
    status: paused ? "paused" : "live",
    "n-chunks": whole.format(cached),
    "n-tokens": plural(chunks.resident.tokens + chunks.host.tokens, "token"),
    "n-rate": percent(hits, references),
    "n-references": `${whole.format(hits)} of ${plural(references, "chunk")} in ${plural(asked, "prompt")}`,
    "n-reused": compact.format(reused),
    "n-share": `${percent(reused, tokens)} of chunk tokens`,
    "n-coming": whole.format(chunks.pending + chunks.fetching),
    "n-fetching": `${whole.format(chunks.pending)} computed, ${whole.format(chunks.fetching)} fetched`,
    total: `${whole.format(cached)} cached`,
  })) $(id).textContent = text;
  showMemory(chunks, memory);
  showHistory(history);
  fill($("prompts"), prompts, makePrompt, showPrompt);
  if (!prompts.length) $("prompts").append(element("li", {class: "dim"}, "No prompt has used chunks yet."));
  for (const [list, field] of [["hottest", "hits"], ["largest", "tokens"], ["pinned", "tokens"]]) showList(list, field);
}

// Of the columns of the history, over the last so many seconds.
function sums(history, seconds) {
  const rows = history.filter(([began]) => began > survey.time - seconds - PERIOD);
  return [0, 1, 2, 3, 4, 5].map(column => rows.reduce((total, row) => total + row[column], 0));
}

function showMemory({resident, pinned, evictable, host}, memory) {
  const rest = part => resident[part] - pinned[part] - evictable[part];
  const locked = {chunks: rest("chunks"), tokens: rest("tokens")};
  const others = $("all").checked ? "" : ", other tenants";
  const tiers = [{
    name: "Device", ...memory.device, other: `text${others}`,
    shares: [["pinned", "pinned", pinned], ["locked", "in use", locked], ["evictable", "evictable", evictable]],
  }];
  if (memory.host) {
    tiers.push({name: "Host", ...memory.host, other: `copies, text${others}`, shares: [["host", "here alone", host]]});
  }
  document.body.classList.toggle("tiers", tiers.length > 1);
  fill($("memory"), tiers, makeTier, showTier);
}

function makeTier() {
  const heads = ["", "chunks", "tokens", "share"].map(unit => element("th", {scope: "col"}, unit));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody"));
  return element("div", {}, element("div"), element("div", {class: "bar", role: "img"}), table);
}

function showTier(shown, {name, size, free, other, shares}) {
  const unknown = size - free - shares.reduce((total, [, , {tokens}]) => total + tokens, 0);
  const all = [...shares, ["other", other, {tokens: Math.max(0, unknown)}], ["free", "free", {tokens: free}]];
  const [title, bar, table] = shown.children;
  title.textContent = `${name}: ${whole.format(size)} tokens, ${percent(size - free, size)} taken`;
  bar.setAttribute("aria-label", all.map(([, label, {tokens}]) => `${label} ${percent(tokens, size)}`).join(", "));
  fill(bar, all, () => element("i"), (segment, [kind, , {tokens}]) => {
    segment.className = kind;
    segment.style.width = `${100 * tokens / size}%`;
  });
  const make = () => {
    const head = element("th", {scope: "row"}, element("span"), "");
    return element("tr", {}, head, element("td"), element("td"), element("td"));
  };
  fill(table.tBodies[0], all, make, (row, [kind, label, {chunks, tokens}]) => {
    const [head, ...cells] = row.children;
    head.firstChild.className = `swatch ${kind}`;
    head.lastChild.data = label;
    const texts = [chunks === undefined ? "" : whole.format(chunks), whole.format(tokens), percent(tokens, size)];
    cells.forEach((cell, i) => { cell.textContent = texts[i]; });
  });
}

// A line of rates over bars of numbers.
function showHistory(history) {
  const width = Math.max(280, $("history").clientWidth), left = 38, top = 8, base = 118, foot = 172, tallest = 40;
  const end = (Math.floor(survey.time / PERIOD) + 1) * PERIOD;
  const span = Math.min(3600, Math.max(600, history.length ? end - history[0][0] : 0));
  const x = time => Math.max(left, left + (width - left) * (1 - (end - time) / span));
  const y = rate => base - (base - top) * rate;
  const most = Math.max(1, ...history.map(([, , references]) => references));
  const bar = Math.max(1.5, (width - left) * PERIOD / span - 1), radius = history.length > 60 ? 1.2 : 2.5;
  const label = (text, x, y, anchor) => element("text", {x, y, "text-anchor": anchor}, text);
  const drawn = [0, .5, 1].flatMap(rate => [
    element("line", {class: "axis", x1: left, x2: width, y1: y(rate), y2: y(rate)}),
    label(`${100 * rate}%`, left - 6, y(rate) + 4, "end"),
  ]);
  let line = "", last = -Infinity;
  for (const [began, prompts, references, hits] of history) {
    const middle = x(began + PERIOD / 2), rate = y(hits / references);
    const found = tallest * hits / most, missed = tallest * (references - hits) / most;
    line += `${began - last > 3 * PERIOD ? "M" : "L"}${middle.toFixed(1)} ${rate.toFixed(1)}`;
    last = began;
    const words = `${ago(began)}: ${hits} of ${plural(references, "chunk")} cached, ${plural(prompts, "prompt")}`;
    const column = {x: middle - bar / 2, width: bar};
    drawn.push(element("g", {},
      element("title", {}, words),
      element("rect", {class: "misses", ...column, y: foot - found - missed, height: missed}),
      element("rect", {class: "hits", ...column, y: foot - found, height: found}),
      element("circle", {class: "dot", cx: middle, cy: rate, r: radius})));
  }
  drawn.push(element("path", {class: "rate", d: line}), label(compact.format(most), left - 6, foot - 30, "end"),
    label(`${Math.round(span / 60)} min ago`, left, foot + 16, "start"), label("now", width, foot + 16, "end"));
  const size = {viewBox: `0 0 ${width} ${foot + 20}`, height: foot + 20};
  $("history").replaceChildren(element("svg", {...size, role: "img", "aria-label": inWords(history)}, ...drawn));
}

function inWords(history) {
  if (!history.length) return "No prompts with chunks in the last hour.";
  const [, , references, hits] = sums(history, 3600), [, , lastReferences, lastHits] = history[history.length - 1];
  const latest = `${percent(lastHits, lastReferences)} in the last ${PERIOD} seconds with prompts`;
  return `Hit rate: ${percent(hits, references)} in the last hour, ${latest}.`;
}

function makePrompt() {
  const strip = element("div", {class: "strip", role: "group"});
  return element("li", {class: "prompt"}, element("span", {class: "dim"}), element("span"), strip);
}

function showPrompt(row, {time, link, cache_salt, num_chunks, chunks}) {
  if (row.className !== "prompt") row.replaceWith(row = makePrompt());
  const [when, found, strip] = row.children, hits = chunks.filter(({hit}) => hit).length;
  when.textContent = when.title = `${ago(time)} · ${link}`;
  found.textContent = `${hits} of ${chunks.length}`;
  strip.setAttribute("aria-label", `${hits} of ${chunks.length} chunks were cached`);
  const more = num_chunks > chunks.length ? [null] : [];
  fill(strip, [...chunks, ...more], () => element("small"), (block, chunk) => {
    if (chunk === null) return block.replaceWith(element("small", {}, `+ ${num_chunks - chunks.length}`));
    if (block.tagName !== "BUTTON") block.replaceWith(block = element("button"));
    const {id, tokens, hit} = chunk;
    leadTo(block, id, cache_salt);
    block.className = hit ? "hit" : "miss";
    block.style.cssText = `flex-grow: ${tokens}; background: ${colour(id)}; border-color: ${colour(id)}`;
    block.title = `${id}, ${plural(tokens, "token")}, ${hit ? "cached" : "not cached"}`;
    block.setAttribute("aria-label", block.title);
    block.tabIndex = block === strip.firstElementChild ? 0 : -1; // arrows lead to the others
  });
}

function showList(list, field) {
  const most = Math.max(...survey[list].map(chunk => chunk[field]));
  fill($(list), survey[list], makeItem, (item, chunk) => {
    if (!item.firstElementChild) item.replaceWith(item = makeItem());
    const button = item.firstElementChild, [block, id, tag, value] = button.children;
    leadTo(button, chunk.id, chunk.cache_salt).title = chunk.id;
    button.style.background = `linear-gradient(to right, var(--bar) ${100 * chunk[field] / most}%, transparent 0)`;
    block.style.background = colour(chunk.id);
    id.textContent = brief(chunk.id);
    tag.textContent = [
      chunk.pinned && list !== "pinned" && "pinned",
      chunk.state !== "resident" && chunk.state,
      chunk.users && `${chunk.users} now`,
      $("all").checked && chunk.cache_salt,
    ].filter(Boolean).join(" · ");
    tag.hidden = !tag.textContent;
    value.textContent = whole.format(chunk[field]);
  });
  if (!survey[list].length) $(list).append(element("li", {class: "dim"}, "None."));
}

function makeItem() {
  const parts = ["swatch", "id", "tag", "number"].map(part => element("span", {class: part}));
  return element("li", {}, element("button", {class: "row"}, ...parts));
}

// One chunk

async function open(id, salt) {
  opened = {id, cache_salt: salt, uses: ""};
  $("chunk-id").textContent = id;
  $("used").textContent = "";
  for (const part of ["facts", "graph"]) $(part).replaceChildren();
  if (!$("chunk").open) $("chunk").showModal();
  await showChunk();
}

async function showChunk() {
  const wanted = opened, {id, cache_salt} = opened;
  const known = ask(`chunks/${id}`, {cache_salt}), used = ask(`lazy/uses/${id}`, {cache_salt});
  const [chunk, uses] = await Promise.allSettled([known, used]);
  if (wanted !== opened) return;
  if (chunk.status === "fulfilled") {
    showFacts(chunk.value);
  } else {
    const words = chunk.reason.status === 404 ? "It is not cached." : chunk.reason.message;
    $("facts").replaceChildren(element("p", {}, words));
  }
  const drawn = JSON.stringify(uses.value);
  if (uses.status === "fulfilled" && drawn !== opened.uses) showUses(uses.value);
  opened.uses = drawn;
}

function showFacts({chunks, registration}) {
  const lists = chunks.map(factsOf);
  if (registration) lists.push({registration: `${registration.state} ${registration.reason || ""}`});
  const pair = ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)));
  $("facts").replaceChildren(...lists.map(facts => element("dl", {}, ...Object.entries(facts).map(pair))));
}

function factsOf(chunk) {
  const end = chunk.pinned_until && new Date(1000 * chunk.pinned_until).toLocaleTimeString();
  return {
    tokens: whole.format(chunk.tokens),
    state: chunk.state,
    where: chunk.tiers.join(", ") || "–",
    hits: whole.format(chunk.hits),
    "users now": chunk.users,
    "last use": chunk.last_use ? ago(chunk.last_use) : "–",
    pinned: !chunk.pinned ? "no" : end ? `until ${end}` : "until it is ended",
    computed: chunk.preamble ? "behind a preamble" : "alone",
    tenant: chunk.cache_salt === null ? "shared" : chunk.cache_salt,
    ...(chunk.lora_path ? {adapter: chunk.lora_path} : {}),
    ...(chunk.dp_rank ? {rank: chunk.dp_rank} : {}),
  };
}

// Prompts on the left, chunks on the right, and which uses which.
function showUses({num_prompts, prompts, together}) {
  $("used").textContent = num_prompts ? `Used by ${plural(num_prompts, "recent prompt")}` : "No recent prompt uses it";
  const nodes = num_prompts ? [{id: opened.id.slice(0, 16)}, ...together] : [], step = 26;
  const width = Math.max(300, $("graph").clientWidth), from = 84, to = Math.max(from + 70, width - 165);
  const middle = (from + to) / 2, height = step * Math.max(nodes.length, prompts.length) + 6;
  const y = (i, count) => (height - step * count) / 2 + step * i + step / 2;
  const edges = prompts.flatMap((prompt, i) => nodes.map((node, j) => {
    const use = prompt.chunks.find(({id}) => id === node.id);
    if (!use) return "";
    const [a, b] = [y(i, prompts.length), y(j, nodes.length)];
    const path = `M${from} ${a}C${middle} ${a} ${middle} ${b} ${to} ${b}`;
    return element("path", {class: `edge ${j ? "" : "mine"} ${use.hit ? "" : "miss"}`, d: path});
  }));
  const users = prompts.flatMap(({time}, i) => {
    const at = y(i, prompts.length);
    const label = element("text", {x: from - 10, y: at + 4, "text-anchor": "end"}, ago(time));
    return [element("circle", {cx: from, cy: at, r: 4, fill: "currentColor"}), label];
  });
  const used = nodes.map(({id, prompts: count}, j) => {
    const at = y(j, nodes.length), block = element("rect", {x: to, y: at - 7, width: 14, height: 14, rx: 3});
    block.style.fill = colour(id);
    const words = `${brief(id)} ${j ? `in ${count}` : "this one"}`;
    const label = element("text", {x: to + 22, y: at + 4, class: j ? "" : "mine"}, words);
    if (!j) return element("g", {}, block, label);
    return leadTo(element("a", {href: `#${id}`}, block, label), id, opened.cache_salt);
  });
  const size = {viewBox: `0 0 ${width} ${height}`, height};
  const words = {role: "group", "aria-label": "Prompts and the chunks that they use"};
  $("graph").replaceChildren(element("svg", {...size, ...words}, ...edges, ...users, ...used));
}

// All chunks

async function list(more) {
  const chosen = Object.fromEntries(["sort", "order", "state"].map(name => [name, $(name).value]));
  try {
    const page = await ask("chunks", {...chosen, limit: 50, cursor: more ? cursor : ""});
    const body = $("listed").tBodies[0];
    if (!more) body.replaceChildren();
    body.append(...page.chunks.map(listed));
    $("listed").hidden = false;
    cursor = page.next;
    $("more").hidden = !cursor;
  } catch (error) {
    complain(error);
  }
}

function listed(chunk) {
  const {id, tokens, hits, state, users, last_use, pinned} = chunk;
  const button = element("button", {class: "row", title: id}, swatch(id), element("span", {class: "id"}, brief(id)));
  const head = element("th", {scope: "row"}, leadTo(button, id, chunk.cache_salt));
  const [used, kept] = [last_use ? ago(last_use) : "–", pinned ? "yes" : ""];
  const cells = [whole.format(tokens), whole.format(hits), state, String(users), used, kept];
  return element("tr", {}, head, ...cells.map(cell => element("td", {}, cell)));
}

// What people do

document.addEventListener("click", event => {
  const target = event.target.closest("[data-chunk]");
  if (!target) return;
  event.preventDefault();
  open(target.dataset.chunk, target.dataset.salt);
});
for (const [kind, on] of [["pointerover", 1], ["focusin", 1], ["pointerout", 0], ["focusout", 0]]) {
  $("prompts").addEventListener(kind, ({target}) => {
    for (const block of $("prompts").querySelectorAll("[data-chunk]")) {
      block.classList.toggle("same", Boolean(on) && block.dataset.chunk === target.dataset.chunk);
    }
  });
}
$("prompts").addEventListener("keydown", event => {
  const side = {ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling"}[event.key];
  const next = side && event.target[side];
  if (!next || !next.dataset.chunk) return;
  event.preventDefault();
  next.focus();
});
$("close").addEventListener("click", () => $("chunk").close());
$("chunk").addEventListener("close", () => { opened = null; });
$("chunk").addEventListener("click", ({target}) => { if (target === $("chunk")) $("chunk").close(); });
$("more").addEventListener("click", () => list(true));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (survey) show();
});
for (const [form, act] of Object.entries({
  find: () => open($("wanted").value, $("salt").value),
  list: () => list(false),
  key: () => {
    sessionStorage.setItem("key", $("secret").value);
    $("secret").value = "";
    poll();
  },
})) {
  $(form).addEventListener("submit", event => {
    event.preventDefault();
    act();
  });
}
for (const id of ["salt", "all"]) {
  $(id).addEventListener("change", () => {
    survey = null;
    $("numbers").hidden = $("listed").hidden = $("more").hidden = true;
    $("status").textContent = "connecting …";
    poll();
  });
}
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
