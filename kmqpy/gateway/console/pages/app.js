import { call, key, live } from "./api.js";
import { el, say, plain, setNow } from "./dom.js";
import { keysPage } from "./keys.js";
import { listPage } from "./list.js";
import { messagePage } from "./message.js";
import { queuePage } from "./queue.js";
import { troublePage } from "./trouble.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
let leaving = new AbortController();
let me = null;

function state(text) {
  if (link.className === text) return;
  link.className = text;
  link.textContent = { live: "live", lost: "connection lost, trying again" }[text] ?? "";
}

function find() {
  const parts = location.hash.replace(/^#\/?/, "").split("/");
  const [room, queue, , id] = parts.map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  if (room === "q" && queue && id) return ["", () => messagePage(queue, id, me)];
  if (room === "q" && queue) return ["", () => queuePage(queue, me)];
  if (room === "trouble") return ["#/trouble", () => troublePage(me)];
  if (room === "keys") return ["#/keys", () => keysPage(me)];
  return ["#/", () => listPage(me)];
}

/** A page is {title, nodes, queue, onEvent}: `queue` is watched alone; without onEvent nothing is. */
async function show() {
  if (location.hash === "#main") return main.focus();
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  document.querySelectorAll("dialog").forEach((one) => one.remove());
  try {
    me ??= await call("GET", "me");
  } catch (error) {
    if (error.status !== 401) fail(error);
    return;
  }
  if (signal.aborted) return;
  document.querySelector("header nav").hidden = false;
  document.getElementById("out").hidden = me.id === "-";
  const [place, make] = find();
  document.querySelectorAll("header nav a").forEach((one) => {
    if (one.getAttribute("href") === place) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  });
  state("");
  const page = make();
  document.title = plain(page.title);
  main.replaceChildren(...page.nodes);
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  if (page.onEvent) {
    live(page.queue, signal, (event) => {
      setNow(event.now_ms);
      if (!signal.aborted) page.onEvent(event);
    }, (text) => signal.aborted || state(text));
  }
}

function fail(error) {
  const again = el("button", { type: "button", onclick: show }, "Try again");
  main.replaceChildren(el("h1", {}, "The gateway does not answer"), el("p", {}, plain(error.message)), again);
}

function signIn(why) {
  leaving.abort();
  state("");
  document.querySelector("header nav").hidden = true;
  document.getElementById("out").hidden = true;
  document.querySelectorAll("dialog").forEach((one) => one.remove());
  const input = el("input", { type: "password", id: "key", autocomplete: "off", required: true, size: "44" });
  const form = el(
    "form", {
      onsubmit: (event) => {
        event.preventDefault();
        key.set(input.value.trim());
        me = null;
        show();
      },
    },
    el("label", { for: "key" }, "Key"),
    el("div", { class: "bar" }, input, el("button", { class: "main" }, "Sign in")),
  );
  document.title = "Sign in";
  main.replaceChildren(
    el("h1", {}, "Sign in"),
    why ? el("p", { class: "notice", role: "alert" }, plain(why)) : null,
    el("p", {}, "With a key of this gateway, as clients send it; kmq key create makes one. What it may do, you may do here. It is kept for this tab only."),
    form,
  );
  input.focus();
}

addEventListener("kmq-out", (event) => {
  const had = key.get();
  key.drop();
  me = null;
  signIn(had ? `The key is not valid (any more). ${event.detail}` : "");
});
addEventListener("hashchange", show);
document.getElementById("out").addEventListener("click", () => {
  key.drop();
  me = null;
  signIn("");
});

const token = /^#token=([\w-]+)$/.exec(location.hash);
if (token) {
  history.replaceState(null, "", location.pathname);
  try {
    key.set((await call("POST", "enter", { token: token[1] })).key);
  } catch (error) {
    say(error.message);
  }
}
await show();
