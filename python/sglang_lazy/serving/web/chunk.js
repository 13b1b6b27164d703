// One chunk, in the dialog

let opened = null; // what the dialog shows: the id of a chunk, and whose it is

async function open(id, salt) {
  opened = {id, cache_salt: salt, uses: ""};
  history.replaceState(null, "", address(id, salt));
  $("chunk-id").textContent = id;
  $("chunk-name").textContent = "Chunk";
  $("used").textContent = "";
  for (const part of ["facts", "graph", "acted"]) $(part).replaceChildren();
  $("acts").hidden = $("rekey").hidden = true;
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
    const words = chunk.reason.status === 404 ? "It is not cached." : reason(chunk.reason);
    $("facts").replaceChildren(element("p", {}, words));
    $("acts").hidden = true;
  }
  const drawn = JSON.stringify(uses.value);
  if (uses.status === "fulfilled" && drawn !== opened.uses) showUses(uses.value);
  opened.uses = drawn;
}

function showFacts({chunks, registration}) {
  const {name} = chunks.find(({name}) => name) || {};
  $("chunk-name").textContent = name || "Chunk";
  document.title = `${name || brief(opened.id)} · sglang-lazy`;
  $("acts").hidden = !chunks.length;
  $("unpin").hidden = !chunks.some(({pinned}) => pinned);
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
    ...Object.fromEntries(Object.entries(chunk.metadata || {}).map(([key, value]) => [`“${key}”`, written(value)])),
    ...(chunk.dp_rank ? {rank: chunk.dp_rank} : {}),
  };
}

// Pins or deletes the chunk in the dialog, in all its copies, and says what came of it.
async function act(method, body) {
  const wanted = opened, {id, cache_salt} = opened;
  let words, refused = false;
  $("acted").textContent = "…";
  try {
    const [done] = (await call(method, `chunks/${id}`, {cache_salt}, body)).affected;
    words = DONE[done.state || (done.pinned ? "pinned" : "unpinned")];
  } catch (error) {
    words = `It did not work: ${reason(error)}`;
    refused = wantsKey(error);
  }
  if (wanted !== opened) return;
  $("acted").textContent = words;
  $("rekey").hidden = !refused;
  await showChunk();
}

const DONE = {
  pinned: "It is pinned.",
  unpinned: "Its pin has ended.",
  deleted: "It is deleted.",
  "in use": "It is in use, and goes when the requests that hold it have ended.",
};
const written = value => (typeof value === "string" ? value : JSON.stringify(value));

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
  const used = nodes.map(({id, name, prompts: count}, j) => {
    const at = y(j, nodes.length), block = element("g", {}, ...colours(id).map((colour, i) => {
      const [from, end] = [ENDS[i - 1] || 0, ENDS[i]].map(part => 16 * part / 100);
      const band = element("rect", {x: to + from, y: at - 7, width: end - from, height: 14});
      band.style.fill = colour;
      return band;
    }));
    const words = `${name ? shortened(name) : brief(id)} ${j ? `in ${count}` : "this one"}`;
    const label = element("text", {x: to + 24, y: at + 4, class: j ? "" : "mine"}, words);
    if (!j) return element("g", {}, block, label);
    return leadTo(element("a", {href: address(id, opened.cache_salt)}, block, label), id, opened.cache_salt);
  });
  const size = {viewBox: `0 0 ${width} ${height}`, height};
  const words = {role: "group", "aria-label": "Prompts and the chunks that they use"};
  $("graph").replaceChildren(element("svg", {...size, ...words}, ...edges, ...users, ...used));
}
