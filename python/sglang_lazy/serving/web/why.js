// Why chunks of a prompt were not cached, in a dialog of its own

let questioned = null; // the prompt that it is about: its request's id, and whose it is

async function explain(rid, salt) {
  const wanted = questioned = {rid, cache_salt: salt};
  history.replaceState(null, "", addressOfPrompt(rid, salt));
  $("why-rid").textContent = rid;
  $("why-prompt").textContent = "…";
  $("why-chunks").replaceChildren();
  if (!$("why").open) $("why").showModal();
  let words, chunks = [];
  try {
    const found = await ask("lazy/why", {rid, cache_salt: salt});
    chunks = found.chunks;
    const missed = chunks.filter(({hit}) => !hit).length;
    words = `${missed} of ${plural(chunks.length, "chunk")} not cached. Policy ${found.link}, answered ${ago(found.time)}.`;
  } catch (error) {
    words = reason(error);
  }
  if (wanted !== questioned) return;
  $("why-prompt").textContent = words;
  $("why-chunks").replaceChildren(...chunks.map(chunk => explained(chunk, salt)));
}

function explained(chunk, salt) {
  const say = chunk.hit ? "It was cached." : `${chunk.words[0].toUpperCase()}${chunk.words.slice(1)}.`;
  const words = element("p", {class: chunk.hit ? "dim" : ""}, say);
  const others = chunk.like ? [named(chunk.like, salt)] : [];
  return element("li", {}, named(chunk, salt, plural(chunk.tokens, "token")), words, ...others);
}

function named(chunk, salt, more = "") {
  const called = element("span", {class: chunk.name ? "name" : "id"}, title(chunk));
  const parts = [swatch(chunk.id), called, element("span", {class: "dim number"}, more)];
  return leadTo(element("button", {class: "row", title: titleAndId(chunk)}, ...parts), chunk.id, salt);
}
