// The server: what it is asked, and its last answer

const PAUSE = 1000, PATIENCE = 3000; // milliseconds between two requests, after an answer and after an error

let survey = null; // the last answer
let received = 0; // when it came, in milliseconds of this browser's clock
let turn = 0; // grows with each request, so that late answers to former ones are left alone
let paused = false;

const ask = (path, query = {}) => call("GET", path, {all: $("all").checked || "", ...query});

async function call(method, path, query, body) {
  const all = {cache_salt: $("salt").value, ...query};
  const given = new URLSearchParams(Object.entries(all).filter(([, value]) => value !== ""));
  const key = sessionStorage.getItem("key"), headers = key ? {Authorization: `Bearer ${key}`} : {};
  const answer = await fetch(`${path}?${given}`, {method, headers, body: body && JSON.stringify(body)});
  const told = await answer.json();
  if (answer.ok) return told;
  const words = told.message || told.error?.message || told.error || told.detail || answer.statusText;
  throw Object.assign(new Error(words), {status: answer.status});
}

const reason = error => (error.status ? error.message : "The server does not answer; trying again.");
const wantsKey = error => error.status === 401 || error.status === 403; // none, a wrong one, or one that opens less

function complain(error) {
  if (!error.status) console.error(error);
  const keyless = error.status === 401;
  if (keyless && sessionStorage.getItem("key")) refuse();
  if (wantsKey(error)) askForKey();
  $("message").hidden = keyless;
  $("message").textContent = reason(error);
  $("status").textContent = keyless ? "locked" : error.status ? "refused" : "no connection";
  $("numbers").hidden = keyless || !survey;
}

// Behind the form, the page stands still until it has a key or is told to go on without another.
function askForKey() {
  if (!$("key").hidden) return;
  $("key").hidden = false;
  $("keep").hidden = !survey;
  $("chunk").close();
  $("why").close();
  $("secret").focus();
}

// Says so until another key has opened the page.
function refuse() {
  sessionStorage.removeItem("key");
  $("wrong").hidden = false;
}

function goOn() {
  $("key").hidden = true;
  poll();
}

async function poll() {
  const mine = ++turn;
  let pause = PAUSE;
  if (!paused && !document.hidden && $("key").hidden) {
    try {
      const answer = await ask("lazy/survey");
      if (mine !== turn) return;
      [survey, received] = [answer, performance.now()];
      $("message").hidden = $("wrong").hidden = true;
      $("numbers").hidden = false;
      $("another").hidden = !sessionStorage.getItem("key");
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
