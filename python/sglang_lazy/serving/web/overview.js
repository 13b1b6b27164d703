// What is seen all the time

const PERIOD = 20; // seconds, of the history

function show() {
  const {chunks, memory, history, evicted, prompts} = survey;
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
  showHistory(history, evicted);
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
    uses: [["pinned", "pinned", pinned], ["locked", "in use", locked], ["evictable", "evictable", evictable]],
  }];
  if (memory.host) {
    tiers.push({name: "Host", ...memory.host, other: `copies, text${others}`, uses: [["host", "here alone", host]]});
  }
  document.body.classList.toggle("tiers", tiers.length > 1);
  fill($("memory"), tiers, makeTier, showTier);
}

function makeTier() {
  const heads = ["", "chunks", "tokens", "share"].map(unit => element("th", {scope: "col"}, unit));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody"));
  return element("div", {}, element("div"), element("div", {class: "bar", role: "img"}), table);
}

function showTier(shown, {name, size, free, other, uses}) {
  const counted = uses.reduce((total, [, , {tokens}]) => total + tokens, 0);
  const known = free !== null, taken = size - free; // a tenant does not learn what the others leave free
  const rest = {tokens: Math.max(0, taken - counted)};
  const all = [...uses, ["other", known ? other : `${other}, free`, rest]];
  if (known) all.push(["free", "free", {tokens: free}]);
  // A beginning that several chunks share counts for each, so that together they may have more than there is.
  const fit = Math.min(1, taken / counted || 0);
  const kept = all.map(([, , {tokens}], i) => tokens * (i < uses.length ? fit : 1));
  const share = shares(kept);
  const [title, bar, table] = shown.children;
  const twice = fit < 1 && counted ? "; a beginning that chunks share counts for each" : "";
  title.textContent = `${name}: ${whole.format(size)} tokens${known ? `, ${whole.format(taken)} taken` : ""}${twice}`;
  bar.setAttribute("aria-label", all.map(([, label], i) => `${label} ${share[i]}`).join(", "));
  fill(bar, all.map(([kind], i) => [kind, kept[i]]), () => element("i"), (segment, [kind, tokens]) => {
    segment.className = kind;
    segment.style.width = `${100 * tokens / size}%`;
  });
  const make = () => {
    const head = element("th", {scope: "row"}, element("span"), "");
    return element("tr", {}, head, element("td"), element("td"), element("td"));
  };
  fill(table.tBodies[0], all.map((one, i) => [...one, share[i]]), make, (row, [kind, label, {chunks, tokens}, part]) => {
    const [head, ...cells] = row.children;
    head.firstChild.className = `swatch ${kind}`;
    head.lastChild.data = label;
    const texts = [chunks === undefined ? "" : whole.format(chunks), whole.format(tokens), part];
    cells.forEach((cell, i) => { cell.textContent = texts[i]; });
  });
}

// A line of rates over bands of bars: numbers in each period.
function showHistory(history, evicted) {
  const width = Math.max(280, $("history").clientWidth), left = 38, top = 8, base = 98, tallest = 26, step = 50;
  const end = (Math.floor(survey.time / PERIOD) + 1) * PERIOD;
  const first = Math.min(end, ...[history, evicted].flatMap(rows => rows.slice(0, 1)).map(([began]) => began));
  const span = Math.min(3600, Math.max(600, end - first));
  const x = time => Math.max(left, left + (width - left) * (1 - (end - time) / span));
  const y = rate => base - (base - top) * rate;
  const bar = Math.max(1.5, (width - left) * PERIOD / span - 1), radius = history.length > 60 ? 1.2 : 2.5;
  const label = (text, x, y, anchor) => element("text", {x, y, "text-anchor": anchor}, text);
  const drawn = [0, .5, 1].flatMap(rate => [
    element("line", {class: "axis", x1: left, x2: width, y1: y(rate), y2: y(rate)}),
    label(`${100 * rate}%`, left - 6, y(rate) + 4, "end"),
  ]);
  let line = "", last = -Infinity;
  for (const [began, , references, hits] of history) {
    const middle = x(began + PERIOD / 2), rate = y(hits / references);
    line += `${began - last > 3 * PERIOD ? "M" : "L"}${middle.toFixed(1)} ${rate.toFixed(1)}`;
    last = began;
    drawn.push(element("circle", {class: "dot", cx: middle, cy: rate, r: radius}));
  }
  drawn.push(element("path", {class: "rate", d: line}));
  const bands = [
    ["chunks in prompts", history, ([, , references, hits]) => [["hits", hits], ["misses", references - hits]]],
    ["chunk tokens reused", history, ([, , , , , reused]) => [["hits", reused]]],
    ["chunks evicted", evicted, ([, chunks]) => [["evictions", chunks]]],
  ];
  bands.forEach(([name, rows, parts], i) => {
    const foot = base + step * (i + 1), total = row => parts(row).reduce((sum, [, number]) => sum + number, 0);
    const most = Math.max(0, ...rows.map(total));
    const bars = rows.map(row => {
      let at = foot;
      const stack = parts(row).map(([kind, number]) => {
        const height = most && tallest * number / most;
        return element("rect", {class: kind, x: x(row[0] + PERIOD / 2) - bar / 2, width: bar, y: at -= height, height});
      });
      return element("g", {}, element("title", {}, `${ago(row[0])}: ${told(row)}`), ...stack);
    });
    function told(row) {
      return row.length === 3 ? `${plural(row[1], "chunk")} evicted` : inPrompts(row);
    }
    drawn.push(label(name, left, foot - tallest - 6, "start"), ...bars,
      element("line", {class: "axis", x1: left, x2: width, y1: foot, y2: foot}),
      label(compact.format(most), left - 6, foot - tallest + 8, "end"));
  });
  const foot = base + step * bands.length + 16;
  drawn.push(label(`${Math.round(span / 60)} min ago`, left, foot, "start"), label("now", width, foot, "end"));
  const size = {viewBox: `0 0 ${width} ${foot + 4}`, height: foot + 4};
  $("history").replaceChildren(element("svg", {...size, role: "img", "aria-label": inWords(history, evicted)}, ...drawn));
}

const inPrompts = ([, prompts, references, hits, , reused]) =>
  `${whole.format(hits)} of ${plural(references, "chunk")} cached, ${plural(reused, "token")} reused, ${plural(prompts, "prompt")}`;

function inWords(history, evicted) {
  const left = sums(evicted, 3600)[1], gone = left ? ` ${plural(left, "chunk")} evicted.` : "";
  if (!history.length) return `No prompts with chunks in the last hour.${gone}`;
  const [, , references, hits] = sums(history, 3600), [, , lastReferences, lastHits] = history[history.length - 1];
  const latest = `${percent(lastHits, lastReferences)} in the last ${PERIOD} seconds with prompts`;
  return `Hit rate: ${percent(hits, references)} in the last hour, ${latest}.${gone}`;
}

function makePrompt() {
  const strip = element("div", {class: "strip", role: "group"});
  const [when, link] = [element("span", {class: "dim"}), element("span", {class: "dim link"})];
  return element("li", {class: "prompt"}, when, link, element("button", {class: "found"}), strip);
}

function showPrompt(row, {rid, time, link, cache_salt, num_chunks, chunks}) {
  if (row.className !== "prompt") row.replaceWith(row = makePrompt());
  const [when, policy, found, strip] = row.children, hits = chunks.filter(({hit}) => hit).length;
  when.textContent = ago(time);
  policy.textContent = link;
  found.textContent = `${hits} of ${chunks.length}`;
  found.title = `Why? Request ${rid}`;
  found.dataset.place = addressOfPrompt(rid, cache_salt);
  strip.setAttribute("aria-label", `${hits} of ${chunks.length} chunks were cached`);
  const more = num_chunks > chunks.length ? [null] : [];
  fill(strip, [...chunks, ...more], () => element("small"), (block, chunk) => {
    if (chunk === null) return block.replaceWith(element("small", {}, `+ ${num_chunks - chunks.length}`));
    if (block.tagName !== "BUTTON") block.replaceWith(block = element("button"));
    const {id, tokens, hit} = chunk;
    leadTo(block, id, cache_salt);
    block.className = hit ? "hit" : "miss";
    block.style.cssText = `flex-grow: ${tokens}; background: ${bands(id)}; border-color: ${colours(id)[0]}`;
    block.title = `${titleAndId(chunk)}, ${plural(tokens, "token")}, ${hit ? "cached" : "not cached"}`;
    block.setAttribute("aria-label", block.title);
    block.tabIndex = block === strip.firstElementChild ? 0 : -1; // arrows lead to the others
  });
}

function showList(list, field) {
  const most = Math.max(...survey[list].map(chunk => chunk[field]));
  fill($(list), survey[list], makeItem, (item, chunk) => {
    if (!item.firstElementChild) item.replaceWith(item = makeItem());
    const button = item.firstElementChild, [block, id, tag, value] = button.children;
    leadTo(button, chunk.id, chunk.cache_salt).title = titleAndId(chunk);
    button.style.background = `linear-gradient(to right, var(--bar) ${100 * chunk[field] / most}%, transparent 0)`;
    block.style.background = bands(chunk.id);
    id.textContent = title(chunk);
    id.className = chunk.name ? "name" : "id";
    tag.textContent = [
      chunk.pinned && list !== "pinned" && "pinned",
      chunk.state !== "resident" && chunk.state,
      ...conditions(chunk),
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
