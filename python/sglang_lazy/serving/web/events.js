// What people do, and the start

document.addEventListener("click", event => {
  const target = event.target.closest("[data-place]");
  if (!target) return;
  event.preventDefault();
  goTo(target.dataset.place);
});
addEventListener("hashchange", follow);
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
for (const name of ["another", "rekey"]) $(name).addEventListener("click", askForKey);
$("keep").addEventListener("click", goOn);
$("pin").addEventListener("click", () => act("PATCH", {pin: true, ttl: Number($("ttl").value) || null}));
$("unpin").addEventListener("click", () => act("PATCH", {pin: false}));
$("delete").addEventListener("click", () => {
  if (confirm("Delete this chunk from the cache? Prompts that need it compute it again.")) act("DELETE");
});
$("chunk").addEventListener("close", () => {
  leave(opened);
  opened = null;
  document.title = "Chunks · sglang-lazy";
});
$("why").addEventListener("close", () => {
  leave(questioned);
  questioned = null;
});
$("why-close").addEventListener("click", () => $("why").close());
for (const name of ["chunk", "why"]) {
  $(name).addEventListener("click", ({target}) => { if (target === $(name)) $(name).close(); });
}
$("more").addEventListener("click", () => list(true));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (survey) show();
});
for (const [form, act] of Object.entries({
  find: () => goTo(address($("wanted").value, $("salt").value)),
  ask: () => goTo(addressOfPrompt($("rid").value, $("salt").value)),
  list: () => list(false),
  key: () => {
    const key = $("secret").value;
    $("secret").value = "";
    if (/[^\x20-\x7e]/.test(key)) return refuse(); // no header can carry it
    sessionStorage.setItem("key", key);
    goOn();
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
    goOn();
  });
}
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
