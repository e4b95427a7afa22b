import { call, queuePath } from "./api.js";
import { el, foreign, number, ago, exact, line, table, ask, say, plain } from "./dom.js";

const FEW = 50;
const MOST = 1000;
const SHOWN = 300;
const PARTITION_HEADS = ["Partition", "Waiting", "In flight", "Dead letters", "Next waits since", "Tracker"];

const bytesOf = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
const decode = (message, field) => message[field] ?? (message[`${field}_base64`] === undefined ? null : `(${bytesOf(message[`${field}_base64`]).length} bytes, base64) ${message[`${field}_base64`]}`);

/** Key, body and headers of a message, all of it. */
export function content(message) {
  const pairs = message.header_pairs?.map(([name, value]) => [name, value === null ? null : new TextDecoder().decode(bytesOf(value))])
    ?? [...Object.entries(message.headers ?? {}), ...Object.entries(message.headers_base64 ?? {})];
  return [
    decode(message, "key") === null ? null : el("p", {}, "Key: ", foreign(decode(message, "key"))),
    el("pre", { tabindex: "0", "aria-label": "Body" }, foreign(decode(message, "body") ?? "", { lines: true })),
    pairs.length ? el("dl", { class: "settings" }, pairs.map(([name, value]) => [el("dt", {}, foreign(name)), el("dd", {}, foreign(value ?? "(nothing)"))])) : null,
  ];
}

function cell(message) {
  if (message === null) return el("td", { class: "soft" }, "the storage has it no more");
  const body = decode(message, "body");
  if (body === null) return el("td", { class: "soft" }, "not for this key");
  const more = el("details", {}, el("summary", {}, foreign(body.slice(0, 80) + (body.length > 80 ? "…" : "") || "(empty)")));
  more.addEventListener("toggle", () => more.children.length > 1 || more.append(el("div", {}, content(message))));
  return el("td", { class: "body" }, more);
}

const idCell = (queue, id) => el("th", { scope: "row", class: "id" }, id === null ? "?" : el("a", { href: `#/q/${encodeURIComponent(queue)}/m/${encodeURIComponent(id)}` }, foreign(id)));

export function queuePage(queue, me) {
  const cards = el("dl", { class: "cards" });
  const graph = el("div", { class: "card" });
  const notice = el("p", { class: "notice", role: "alert", hidden: true });
  const settings = el("dl", { class: "settings" });
  const search = el("input", { type: "search", id: "find", size: "34", oninput: filter });
  const places = { waiting: el("section"), flight: el("section"), dead: el("section") };
  const partitions = el("section");
  const actions = el("div", { class: "bar" });
  const chosen = new Set();
  let may = null;
  let limit = FEW;
  let letters = [];

  const wrong = (place, title, error) => places[place].replaceChildren(el("h2", {}, title), el("p", { class: "notice", role: "alert" }, plain(error.message)));

  function searchable(row, ...texts) {
    row.dataset.find = texts.filter((one) => one != null).join("\0").toLowerCase();
    return row;
  }

  function filter() {
    const wanted = search.value.toLowerCase();
    document.querySelectorAll("tr[data-find]").forEach((row) => {
      const [id, key, body] = row.dataset.find.split("\0");
      row.hidden = Boolean(wanted) && !(id.includes(wanted) || key.includes(wanted) || body.startsWith(wanted));
    });
  }

  const texts = (message) => [message.id, decode(message, "key") ?? "", (decode(message, "body") ?? "").slice(0, SHOWN)];

  async function waiting() {
    const title = "Waiting";
    try {
      const found = (await call("GET", queuePath(queue, `/peek?limit=${limit}`))).messages;
      const rows = found.map((one) => searchable(
        el("tr", {}, idCell(queue, one.id), el("td", { class: "body" }, foreign(decode(one, "key") ?? "")), cell(one),
          el("td", { class: "number" }, number(one.attempts)), el("td", {}, ago(one.first_enqueued_ms))), ...texts(one)));
      places.waiting.replaceChildren(el("h2", {}, title), table(`The next ${found.length} messages that can be taken`, ["Id", "Key", "Body", "Attempt", "Sent"], rows));
    } catch (error) {
      wrong("waiting", title, error);
    }
  }

  async function flight() {
    const title = "In flight";
    try {
      const found = (await call("GET", queuePath(queue, `/orphans?limit=${limit}`))).orphans;
      const rows = found.map((one) => searchable(
        el("tr", {}, idCell(queue, one.message?.id ?? null), el("td", { class: "name" }, one.holder === null ? el("span", { class: "soft" }, "no name") : foreign(one.holder)),
          el("td", {}, ago(one.since_ms)), el("td", {}, ago(one.lease_until_ms)), el("td", { class: "number" }, number(one.message?.attempts)), cell(one.message)),
        ...(one.message ? texts(one.message) : ["", "", ""])));
      places.flight.replaceChildren(el("h2", {}, title), table(`${found.length} messages that are taken and not finished`, ["Id", "By", "Since", "Until", "Attempts", "Body"], rows));
    } catch (error) {
      wrong("flight", title, error);
    }
  }

  async function dead() {
    const title = "Dead letters";
    chosen.clear();
    try {
      letters = (await call("GET", queuePath(queue, `/dead-letters${may.includes("poll") ? "/peek" : ""}?limit=${limit}`))).dead_letters;
    } catch (error) {
      return wrong("dead", title, error);
    }
    const some = el("button", { type: "button", disabled: true, onclick: () => redrive([...chosen]) }, "Redrive chosen…");
    const choose = (id, on) => {
      chosen[on ? "add" : "delete"](id);
      some.disabled = !chosen.size;
    };
    const every = el("input", { type: "checkbox", "aria-label": "Choose all that are shown", onchange: () => places.dead.querySelectorAll("tbody tr:not([hidden]) input").forEach((one) => {
      one.checked = every.checked;
      choose(one.value, one.checked);
    }) });
    const poll = may.includes("poll");
    const rows = letters.map((one) => searchable(
      el("tr", {}, poll ? el("td", {}, el("input", { type: "checkbox", value: one.id, "aria-label": `Choose ${plain(one.id)}`, onchange: (event) => choose(one.id, event.target.checked) })) : null,
        idCell(queue, one.id), el("td", { class: "name" }, foreign(one.reason ?? "not known")), el("td", { class: "number" }, number(one.attempts)),
        el("td", {}, ago(one.dead_since_ms)), el("td", { class: "number" }, number(one.size)), cell(one)), ...texts(one)));
    places.dead.replaceChildren(
      el("h2", {}, title),
      poll && letters.length ? el("div", { class: "bar" }, some,
        el("button", { type: "button", onclick: () => redrive(null) }, "Redrive all…"),
        el("button", { type: "button", class: "bad", onclick: () => purge("/dead-letters/purge", "dead letters") }, "Remove all…")) : "",
      table(`The oldest ${letters.length} dead letters`, [...(poll ? [el("th", { scope: "col" }, every)] : []), "Id", "Reason", "Attempts", "Dead", "Bytes", "Body"], rows),
    );
  }

  async function redrive(ids) {
    const those = ids === null ? letters : letters.filter((one) => ids.includes(one.id));
    const listed = those.slice(0, 20).map((one) => el("li", {}, el("span", { class: "id" }, foreign(one.id)), " ", foreign(one.reason ?? "")));
    let count = 0;
    const told = ids === null ? "All dead letters of this queue, also those that are not shown, go back into it." : `${ids.length} dead ${ids.length === 1 ? "letter goes" : "letters go"} back into the queue.`;
    const done = await ask("Redrive dead letters?", [
      el("p", {}, `${told} They begin with no attempts; what made them fail should be mended.`), el("ul", {}, listed),
      those.length > 20 ? el("p", { class: "soft" }, `and ${those.length - 20} more`) : null,
    ], { confirm: "Redrive", act: async () => (count = (await call("POST", queuePath(queue, "/dead-letters/redrive"), ids === null ? {} : { ids })).count) });
    if (done) {
      say(`${count} redriven.`);
      load();
    }
  }

  async function purge(path, what) {
    const typed = el("input", { id: "typed", autocomplete: "off", spellcheck: "false" });
    let count = 0;
    const done = await ask(`Remove all ${what} of ${plain(queue)}?`, [
      el("p", {}, `They are gone for good${what === "messages" ? ", those in flight too; dead letters stay" : ""}.`),
      el("label", { for: "typed" }, "Type the name of the queue"), typed,
    ], { confirm: "Remove", bad: true, ready: () => typed.value === queue || typed.value === plain(queue), act: async () => (count = (await call("POST", queuePath(queue, path))).count) });
    if (done) {
      say(`${count} ${what} removed.`);
      load();
    }
  }

  async function send() {
    const body = el("textarea", { id: "body" });
    const fields = Object.fromEntries(["key", "delay", "priority", "group"].map((name) => [name, el("input", { id: `send-${name}` })]));
    const can = me.storages[queue.split(":")[0]] ?? me.storages[""] ?? {};
    const shown = Object.entries({ key: ["Key", true], delay: ["Delay, seconds", can.delay], priority: ["Priority, 0 to 9", can.priority], group: ["Group", can.groups] }).filter(([, [, one]]) => one);
    let id = "";
    const done = await ask(`Send a message to ${plain(queue)}`, [
      el("label", { for: "body" }, "Body"), body,
      el("div", { class: "pair" }, shown.map(([name, [label]]) => el("div", {}, el("label", { for: `send-${name}` }, label), fields[name]))),
    ], { confirm: "Send", act: async () => {
      const query = new URLSearchParams(shown.map(([name]) => [name, fields[name].value]).filter(([, value]) => value));
      id = (await call("POST", queuePath(queue, `/messages?${query}`), body.value, { "Content-Type": "text/plain; charset=utf-8" })).id;
    } });
    if (done) {
      say(`Sent: ${id}`);
      load();
    }
  }

  async function described() {
    try {
      const found = await call("GET", queuePath(queue, ""));
      const value = (one) => (one === null ? "–" : typeof one === "object" ? JSON.stringify(one) : String(one));
      settings.replaceChildren(...Object.entries(found.settings).filter(([name]) => name !== "name")
        .flatMap(([name, one]) => [el("dt", {}, foreign(name.replace(/_ms$/, ""))), el("dd", {}, foreign(name.endsWith("_ms") && one !== null ? exact(one) : value(one)))]));
    } catch (error) {
      settings.replaceChildren(el("dd", {}, plain(error.message)));
    }
  }

  async function load() {
    if (may === null) return;
    const looks = [dead(), described()];
    if (may.includes("poll")) looks.push(waiting(), flight());
    else places.waiting.replaceChildren(el("h2", {}, "Messages"), el("p", {}, "To see messages, the key needs the permission ", el("code", {}, `queue|poll|${plain(queue)}`), "."));
    await Promise.all(looks);
    filter();
  }

  function act() {
    const more = el("button", { type: "button", onclick: () => {
      limit = Math.min(limit * 4, MOST);
      more.disabled = limit === MOST;
      load();
    } }, "Show more");
    actions.replaceChildren(
      el("div", {}, el("label", { for: "find" }, "Search id, key, beginning of body"), search),
      el("button", { type: "button", onclick: load }, "Look again"), more,
      ...(may.includes("post") ? [el("button", { type: "button", class: "main", onclick: send }, "Send a message…")] : []),
      ...(may.includes("poll") ? [el("button", { type: "button", class: "bad", onclick: () => purge("/purge", "messages") }, "Purge…")] : []),
    );
  }

  function onEvent(event) {
    notice.hidden = !event.problem;
    notice.textContent = event.problem ? `${event.problem}; what is shown is from before` : "";
    if (event.gone.includes(queue)) {
      notice.hidden = false;
      notice.textContent = "This queue is not there (any more).";
    }
    const row = event.rows.find((one) => one.name === queue);
    if (!row) return;
    const all = [["Waiting", number(row.ready)], ["Delayed", number(row.delayed)], ["In flight", number(row.in_flight)],
      ["Dead letters", el("span", { class: row.dead ? "dead" : "" }, number(row.dead))], ["Next waits since", ago(row.oldest_ms, { bare: true })],
      ["In / out per min", el("span", { title: "through this gateway" }, number(row.in), " / ", number(row.out))]];
    cards.replaceChildren(...all.map(([name, made]) => el("div", {}, el("dt", {}, name), el("dd", {}, made))));
    graph.replaceChildren(line(row.depths ?? [], "big"));
    if (row.partitions?.length) partitions.replaceChildren(el("h2", {}, "Partitions"), table(`${row.partitions.length} partitions and the trackers that redeliver their messages`, PARTITION_HEADS, row.partitions.map((one) => el("tr", {}, el("th", { scope: "row" }, number(one.partition)),
      ...[one.waiting, one.in_flight, one.dead].map((count) => el("td", { class: "number" }, number(count))), el("td", {}, ago(one.oldest_ms)),
      el("td", { class: "name" }, one.tracker === null ? el("span", { class: "dead" }, "none") : foreign(one.tracker))))));
    if (row.error) {
      notice.hidden = false;
      notice.textContent = plain(row.error);
    }
    if (may === null) {
      may = row.may;
      act();
      load();
    }
  }

  const nodes = [
    el("p", {}, el("a", { href: "#/" }, "All queues")), el("h1", {}, foreign(queue)), notice, cards, graph, actions,
    places.waiting, places.flight, places.dead, partitions,
    el("h2", {}, "Settings"), el("div", { class: "card" }, settings),
  ];
  return { title: queue, nodes, queue, onEvent };
}
