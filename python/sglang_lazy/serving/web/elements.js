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

// A click on `node` shows this chunk.
function leadTo(node, id, salt) {
  node.dataset.chunk = id;
  node.dataset.place = address(id, salt);
  return node;
}

// Three colours of 72: a single one, of so few that eyes tell apart, would stand for many chunks.
function colours(id) {
  return [0, 1, 2].map(i => {
    const drawn = parseInt(id.slice(5 * i, 5 * i + 5), 16) % 72, shade = drawn % 3 - 1;
    return `oklch(calc(var(--light) + ${shade * .09}) ${.13 + shade * .02} ${15 * Math.floor(drawn / 3)})`;
  });
}

const ENDS = [50, 75, 100]; // of the three, in percent

function bands(id) {
  const [one, two, three] = colours(id);
  return `linear-gradient(to right, ${one} ${ENDS[0]}%, ${two} 0 ${ENDS[1]}%, ${three} 0)`;
}

function swatch(id) {
  const made = element("span", {class: "swatch"});
  made.style.background = bands(id);
  return made;
}
