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
