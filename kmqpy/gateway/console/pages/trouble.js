import { call } from "./api.js";
import { el, foreign, table, plain } from "./dom.js";
import { queueLink } from "./list.js";

const OLD_MS = 15 * 60 * 1000;

/** What the counts of queues tell. */
function ofRows(rows, nowMs) {
  const found = [];
  for (const row of rows) {
    if (row.error) found.push([row.name, `it can't be looked at: ${row.error}`, "look at the storage and at the gateway's log"]);
    if (row.dead) found.push([row.name, `${row.dead} dead letters`, "look at their reasons; redrive them when the cause is mended"]);
    if (row.held_groups) found.push([row.name, `${row.held_groups} groups wait for their dead letters`, "redrive or remove these"]);
    const old = row.oldest_ms && nowMs - row.oldest_ms > OLD_MS;
    if (old && !row.in_flight) found.push([row.name, "messages wait, and nobody takes any", "start a consumer, or look why it stands still"]);
    else if (old) found.push([row.name, "messages wait longer than 15 minutes", "add consumers, or make handlers faster"]);
  }
  return found;
}

export function troublePage() {
  const list = el("div", {}, el("p", { role: "status" }, "Looking…"));
  let own = [];
  let doctor = null;
  let wrong = "";
  const rows = new Map();

  function draw() {
    const all = [
      ...(doctor ?? []).map((one) => [one.queue, one.what, one.to_do, one.severity]),
      ...own.map((one) => [...one, "warning"]),
    ];
    const lines = all.map(([queue, what, todo, severity]) =>
      el("tr", {}, el("td", { class: severity === "error" ? "dead" : "" }, severity),
        el("td", { class: "name" }, rows.has(queue) ? el("a", { href: queueLink(queue) }, foreign(queue)) : foreign(queue)),
        el("td", {}, foreign(what)), el("td", {}, foreign(todo))));
    const said = doctor === null && !wrong ? "the doctor is still looking" : "nothing is wrong";
    const part = table("What is wrong, and what to do", ["How bad", "Where", "What", "What to do"], lines, { cls: "trouble", empty: said });
    list.replaceChildren(...(wrong ? [el("p", { class: "notice", role: "alert" }, plain(wrong))] : []), part);
  }

  function onEvent(event) {
    for (const name of event.gone) rows.delete(name);
    for (const row of event.rows) rows.set(row.name, row);
    const now = ofRows(rows.values(), event.now_ms);
    if (JSON.stringify(now) !== JSON.stringify(own) || event.whole) {
      own = now;
      draw();
    }
  }

  call("GET", "findings").then((found) => (doctor = found.findings), (error) => (wrong = error.message)).then(draw);
  return { title: "Trouble", nodes: [el("h1", {}, "Trouble"), list], queue: "", onEvent };
}
