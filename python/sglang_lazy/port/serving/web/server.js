// The server: what it is asked, and its last answer

const PAUSE = 1000, PATIENCE = 3000; // milliseconds between two requests, after an answer and after an error

let survey = null; // the last answer
let received = 0; // when it came, in milliseconds of this browser's clock
let turn = 0; // grows with each request, so that late answers to former ones are left alone
let paused = false;

async function ask(path, query = {}) {
  const all = {cache_salt: $("salt").value, all: $("all").checked || "", ...query};
  const given = new URLSearchParams(Object.entries(all).filter(([, value]) => value !== ""));
  const key = sessionStorage.getItem("key");
  const answer = await fetch(`${path}?${given}`, {headers: key ? {Authorization: `Bearer ${key}`} : {}});
  const body = await answer.json();
  if (answer.ok) return body;
  throw Object.assign(new Error(body.detail || body.error?.message || body.error || answer.statusText), {status: answer.status});
}

function complain(error) {
  if (!error.status) console.error(error);
  const keyless = error.status === 401;
  if (keyless && sessionStorage.getItem("key")) refuse();
  $("key").hidden = !keyless;
  if (keyless) $("chunk").close();
  $("message").hidden = keyless;
  $("message").textContent = error.status ? error.message : "The server does not answer; trying again.";
  $("status").textContent = keyless ? "locked" : error.status ? "refused" : "no connection";
  $("numbers").hidden = keyless || !survey;
}

// Says so until another key has opened the page.
function refuse() {
  sessionStorage.removeItem("key");
  $("wrong").hidden = false;
}

async function poll() {
  const mine = ++turn;
  let pause = PAUSE;
  if (!paused && !document.hidden) {
    try {
      const answer = await ask("lazy/survey");
      if (mine !== turn) return;
      [survey, received] = [answer, performance.now()];
      $("message").hidden = $("key").hidden = $("wrong").hidden = true;
      $("numbers").hidden = false;
      show();
      if (opened) await showChunk();
      else follow();
    } catch (error) {
      if (mine !== turn) return;
      complain(error);
      pause = PATIENCE;
    }
  }
  setTimeout(() => mine === turn && poll(), pause);
}
