// The page's address, which names what a dialog shows, so that it can be kept and sent

const ofTenant = salt => (salt ? `/${encodeURIComponent(salt)}` : ""); // null or empty for the shared one
const address = (id, salt) => `#${id}${ofTenant(salt)}`; // of a chunk
const addressOfPrompt = (rid, salt) => `#why/${encodeURIComponent(rid)}${ofTenant(salt)}`;

// What the address names is shown, and nothing else.
function follow() {
  const [, id, salt = ""] = location.hash.match(/^#([0-9a-f]{16,64})(?:\/(.*))?$/) || [];
  const [, rid, whose = ""] = location.hash.match(/^#why\/([^/]+)(?:\/(.*))?$/) || [];
  if (!id) $("chunk").close();
  if (!rid) $("why").close();
  if (!survey || location.hash === placeOf(opened) || location.hash === placeOf(questioned)) return;
  if (id) open(id, decoded(salt));
  if (rid) explain(decoded(rid), decoded(whose));
}

const placeOf = shown => shown && (shown.id ? address(shown.id, shown.cache_salt) : addressOfPrompt(shown.rid, shown.cache_salt));

function goTo(place) {
  location.hash = place;
  follow(); // at once: the browser's event comes later
}

// A dialog has been closed: the address no longer names what it has shown, unless the page only waits for a key.
function leave(shown) {
  if ($("key").hidden && location.hash === placeOf(shown)) history.replaceState(null, "", location.pathname);
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
