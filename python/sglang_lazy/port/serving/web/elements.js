// Elements, and what chunks look like

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

function colour(id) {
  const hue = Math.round(parseInt(id.slice(0, 4), 16) * 360 / 65536), shade = parseInt(id[4], 16) % 3 - 1;
  return `oklch(calc(var(--light) + ${shade * .09}) ${.13 + shade * .02} ${hue})`;
}

function swatch(id) {
  const made = element("span", {class: "swatch"});
  made.style.background = colour(id);
  return made;
}
