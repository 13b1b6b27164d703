// All chunks

let cursor = null; // of the list's next page

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
  const named = element("span", {class: chunk.name ? "name" : "id"}, title(chunk));
  const tags = conditions(chunk).map(text => element("span", {class: "tag"}, text));
  const button = element("button", {class: "row", title: titleAndId(chunk)}, swatch(id), named, ...tags);
  const head = element("th", {scope: "row"}, leadTo(button, id, chunk.cache_salt));
  const [used, kept] = [last_use ? ago(last_use) : "–", pinned ? "yes" : ""];
  const cells = [whole.format(tokens), whole.format(hits), state, String(users), used, kept];
  return element("tr", {}, head, ...cells.map(cell => element("td", {}, cell)));
}
