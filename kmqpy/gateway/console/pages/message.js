import { call, queuePath } from "./api.js";
import { el, foreign, ago, plain } from "./dom.js";
import { queueLink } from "./list.js";
import { content } from "./queue.js";

const MOST = 1000;

const step = (at, what, about = "") => el("li", {}, el("strong", {}, foreign(what)), " ", ago(at), about ? el("div", { class: "soft" }, foreign(about)) : null);

function ofTrace(event) {
  const about = [event.by && `by ${event.by}`, event.for_ms !== null && `for ${event.for_ms / 1000} s`, event.record && `record ${event.record}`,
    event.copy && `copy ${event.copy}`, event.reason, event.late && "late: it was finished before", event.counts ? "" : "not an attempt"];
  return step(event.at_ms, event.what, about.filter(Boolean).join(" · "));
}

/** What the storage still knows of a message: sent, queued again, taken, dead. */
function ofPlace({ message, orphan, letter }) {
  const one = message ?? letter;
  const steps = one.first_enqueued_ms ? [[one.first_enqueued_ms, "sent"]] : [];
  if (one.enqueued_ms && one.enqueued_ms !== one.first_enqueued_ms) steps.push([one.enqueued_ms, "queued again", `${one.attempts} attempts so far`]);
  if (orphan) steps.push([orphan.since_ms, "taken", orphan.holder ? `by ${orphan.holder}` : ""], [orphan.lease_until_ms, "its lease ends"]);
  if (letter) steps.push([letter.dead_since_ms, "became a dead letter", `${letter.reason ?? "reason not known"} · ${letter.attempts ?? "?"} attempts`]);
  return steps.map((all) => step(...all));
}

async function place(queue, id) {
  const get = (path) => call("GET", queuePath(queue, path));
  const waits = (await get(`/peek?limit=${MOST}`)).messages.find((one) => one.id === id);
  if (waits) return { state: "waiting", message: waits };
  const orphan = (await get(`/orphans?limit=${MOST}`)).orphans.find((one) => one.message?.id === id);
  if (orphan) return { state: "in flight", message: orphan.message, orphan };
  const letter = (await get(`/dead-letters/peek?limit=${MOST}`)).dead_letters.find((one) => one.id === id);
  return letter ? { state: "dead letter", letter } : null;
}

export function messagePage(queue, id) {
  const shown = el("div", {}, el("p", { role: "status" }, "Looking…"));

  async function load() {
    const parts = [];
    let traced = false;
    try {
      const { life } = await call("GET", queuePath(queue, `/trace?message=${encodeURIComponent(id)}`));
      parts.push(el("p", {}, "State: ", el("strong", {}, life.state)), el("ol", { class: "life" }, life.events.map(ofTrace)));
      traced = true;
    } catch (error) {
      if (error.status !== 501) parts.push(el("p", { class: "notice", role: "alert" }, plain(error.message)));
    }
    try {
      const found = await place(queue, id);
      if (found && !traced) parts.push(el("p", {}, "State: ", el("strong", {}, found.state)), el("ol", { class: "life" }, ofPlace(found)));
      if (found) parts.push(el("h2", {}, "Content"), el("div", { class: "card" }, content(found.message ?? found.letter)));
      else if (!traced) parts.push(el("p", {}, "It is none of the first 1,000 messages that wait, are in flight or are dead letters: it is finished, delayed or further behind."));
    } catch (error) {
      if (!parts.length) parts.push(el("p", { class: "notice", role: "alert" }, plain(error.message)));
    }
    shown.replaceChildren(...parts);
  }

  load();
  const nodes = [
    el("p", {}, el("a", { href: queueLink(queue) }, "Queue ", foreign(queue))),
    el("h1", {}, "Message ", foreign(id)),
    el("div", { class: "bar" }, el("button", { type: "button", onclick: load }, "Look again")), shown,
  ];
  return { title: `Message ${id}`, nodes };
}
