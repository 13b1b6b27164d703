// Words and numbers

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1});
const plural = (n, one) => `${whole.format(n)} ${one}${n === 1 ? "" : "s"}`;
const brief = id => `${id.slice(0, 8)}…`;
const title = ({id, name}) => name || brief(id); // what a chunk is called
const shortened = name => (name.length > 14 ? `${name.slice(0, 13)}…` : name);
const conditions = ({preamble, lora_path}) => [preamble && "behind a preamble", lora_path].filter(Boolean); // of its KV
const titleAndId = ({id, name}) => (name ? `${name}, ${id}` : id);

function percent(part, all) {
  if (!all) return "–";
  const share = 100 * part / all;
  if (share > 0 && share < .1) return "<0.1%";
  if (share > 99.9 && share < 100) return ">99.9%";
  return `${share.toFixed(share % 100 && Math.abs(share - 50) > 49 ? 1 : 0)}%`;
}

// Of all parts, in tenths of a percent, so that they add up to 100: those cut off most get what is missing.
function shares(parts) {
  const all = parts.reduce((total, part) => total + part, 0);
  if (!all) return parts.map(() => "–");
  const tenths = parts.map(part => Math.floor(1000 * part / all));
  const missing = 1000 - tenths.reduce((total, part) => total + part, 0);
  const cut = parts.map((part, i) => [1000 * part / all - tenths[i], i]).sort(([a], [b]) => b - a);
  for (const [, i] of cut.slice(0, missing)) tenths[i]++;
  return tenths.map((part, i) => (part || !parts[i] ? `${(part / 10).toFixed(1)}%` : "<0.1%"));
}

function ago(time) {
  const now = survey.time + (performance.now() - received) / 1000;
  const seconds = Math.max(0, Math.round(now - time));
  if (seconds < 100) return `${seconds} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}
