import { el, foreign, number, ago, line } from "./dom.js";

const COLUMNS = [
  ["name", "Queue", "name"],
  ["waiting", "Waiting", "number"],
  ["in_flight", "In flight", "number"],
  ["oldest_ms", "Oldest", "number extra"],
  ["in", "In/min", "number extra"],
  ["out", "Out/min", "number extra"],
  ["dead", "Dead", "number"],
  ["depths", "Last hour", "extra"],
];

export const queueLink = (name) => `#/q/${encodeURIComponent(name)}`;

export function listPage() {
  const rows = new Map();
  let order = ["name", 1];
  const body = el("tbody");
  const count = el("p", { class: "soft", role: "status" }, "Looking…");
  const notice = el("p", { class: "notice", role: "alert", hidden: true });
  const search = el("input", { type: "search", id: "find", size: "30", oninput: draw });
  const heads = COLUMNS.map(([field, text, cls]) => {
    if (field === "depths") return el("th", { scope: "col", class: cls }, text);
    const title = { in: "sent through this gateway", out: "acknowledged through this gateway" }[field];
    const button = el("button", { type: "button", title, onclick: () => sort(field) }, text);
    return el("th", { scope: "col", class: cls, "data-field": field }, button);
  });

  function sort(field) {
    order = [field, order[0] === field ? -order[1] : field === "name" ? 1 : -1];
    draw();
  }

  function value(row) {
    const [field] = order;
    if (field === "waiting") return (row.shown.ready ?? -1) + (row.shown.delayed ?? 0);
    if (field === "oldest_ms") return -(row.shown.oldest_ms ?? Infinity);
    return row.shown[field] ?? -1;
  }

  function draw() {
    const wanted = search.value.toLowerCase();
    const all = [...rows.values()].filter((one) => one.shown.name.toLowerCase().includes(wanted));
    all.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * order[1] || (a.shown.name < b.shown.name ? -1 : 1);
    });
    for (const head of heads) {
      if (head.dataset.field === order[0]) head.setAttribute("aria-sort", order[1] > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const nodes = all.map((one) => one.node);
    if (nodes.length !== body.children.length || nodes.some((one, i) => one !== body.children[i])) {
      const focused = document.activeElement;
      body.replaceChildren(...nodes);
      if (body.contains(focused)) focused.focus({ preventScroll: true });
    }
    const hidden = rows.size - all.length;
    count.textContent = rows.size
      ? `${all.length} ${all.length === 1 ? "queue" : "queues"}${hidden ? `, ${hidden} hidden by the search` : ""}`
      : "No queues yet. The first message that is sent makes one, as does: kmq queue create NAME";
  }

  function make(name) {
    const cells = Object.fromEntries(COLUMNS.slice(1).map(([field, , cls]) => [field, el("td", { class: cls })]));
    const anchor = el("a", { href: queueLink(name) }, foreign(name));
    const node = el("tr", {}, el("th", { scope: "row", class: "name" }, anchor), Object.values(cells));
    return { node, cells, shown: {} };
  }

  function fill({ cells, shown }, before) {
    const put = (field, made) => cells[field].replaceChildren(made);
    const changed = (...fields) => fields.some((one) => JSON.stringify(before[one]) !== JSON.stringify(shown[one]));
    if (shown.ready == null) return put("waiting", shown.error ? el("span", { class: "dead" }, "?") : "…");
    if (changed("ready", "delayed")) put("waiting", number(shown.ready + shown.delayed));
    if (changed("in_flight")) put("in_flight", number(shown.in_flight));
    if (changed("oldest_ms", "ready")) put("oldest_ms", ago(shown.oldest_ms, { bare: true }));
    if (changed("in")) put("in", number(shown.in));
    if (changed("out")) put("out", number(shown.out));
    if (changed("dead")) put("dead", el("span", { class: shown.dead ? "dead" : "" }, number(shown.dead)));
    if (changed("depths")) put("depths", line(shown.depths));
  }

  function onEvent(event) {
    notice.hidden = !event.problem;
    notice.textContent = event.problem ? `${event.problem}; what is shown is from before` : "";
    if (event.whole) {
      const present = new Set(event.rows.map((one) => one.name));
      for (const name of rows.keys()) if (!present.has(name)) rows.delete(name);
    }
    for (const name of event.gone) rows.delete(name);
    for (const shown of event.rows) {
      const row = rows.get(shown.name) ?? make(shown.name);
      rows.set(shown.name, row);
      const before = row.shown;
      row.shown = shown;
      fill(row, before);
    }
    if (event.whole && !rows.size) return; // the first round has not ended
    draw();
  }

  const shown = el("table", { class: "queues" }, el("caption", {}, "Rates count what passes this gateway; the last hour shows what was seen while somebody looked."),
    el("thead", {}, el("tr", {}, heads)), body);
  const nodes = [
    el("h1", {}, "Queues"), notice,
    el("div", { class: "bar" }, el("div", {}, el("label", { for: "find" }, "Search by name"), search)),
    count, el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Queues" }, shown),
  ];
  return { title: "Queues", nodes, queue: "", onEvent };
}
