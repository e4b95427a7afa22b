// Makes elements; text becomes text nodes only, never markup.

const ODD = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0]/u;
const ODD_ALL = /([\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0])/u;
const LINES = new Set(["\n", "\t"]);

/** An element: `props` are attributes, listeners (`onclick`) and properties after a dot (`.value`). */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith(".")) made[name.slice(1)] = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((one) => one != null && one !== false));
  return made;
}

/** Text of strangers: characters that are not seen, or turn others around, are shown by their numbers. */
export function foreign(text, { lines = false } = {}) {
  const made = el("bdi");
  for (const part of String(text).split(ODD_ALL)) {
    if (ODD.test(part) && !(lines && LINES.has(part))) {
      const code = part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      made.append(el("span", { class: "odd" }, `U+${code}`));
    } else if (part) made.append(part);
  }
  return made;
}

/** The same for attributes and messages. */
export function plain(text) {
  return foreign(text).textContent;
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function number(count) {
  if (count == null) return el("span", { class: "soft" }, "–");
  return el("span", { title: whole.format(count) }, count < 100000 ? whole.format(count) : short.format(count));
}

let skewMs = 0;
export function setNow(ms) {
  skewMs = ms - Date.now();
}

const units = [["d", 86400000], ["h", 3600000], ["min", 60000], ["s", 1000]];

/** A duration exactly, in the largest unit of which it is a whole number. */
export function exact(ms) {
  const [unit, size] = units.find(([, size]) => ms && ms % size === 0) ?? ["ms", 1];
  return `${ms / size} ${unit}`;
}

function span(ms) {
  const [unit, size] = units.find(([, size]) => ms >= size) ?? units[3];
  return `${Math.floor(ms / size)} ${unit}`;
}

/** A time as a distance from now, with the exact one in a tooltip. */
export function ago(ms, { bare = false } = {}) {
  if (ms == null) return el("span", { class: "soft" }, "–");
  const date = new Date(ms);
  const made = el("time", { class: "when" });
  if (Number.isNaN(date.getTime())) return el("span", {}, String(ms));
  made.dateTime = date.toISOString();
  made.title = `${date.toLocaleString()} (${made.dateTime})`;
  made.dataset.ms = ms;
  made.dataset.bare = bare ? "1" : "";
  tell(made);
  return made;
}

function tell(time) {
  const past = Date.now() + skewMs - Number(time.dataset.ms);
  const text = Math.abs(past) < 1000 ? "now" : span(Math.abs(past));
  const told = time.dataset.bare || text === "now" ? text : past > 0 ? `${text} ago` : `in ${text}`;
  if (time.textContent !== told) time.textContent = told;
}

setInterval(() => document.querySelectorAll("time[data-ms]").forEach(tell), 1000);

/** A line of [minute, count]; minutes are counted back from now. */
export function line(points, cls = "") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", `line ${cls}`);
  svg.setAttribute("viewBox", "0 0 60 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const counts = points.map(([, count]) => count);
  const most = Math.max(1, ...counts);
  const told = points.length ? `from ${Math.min(...counts)} to ${Math.max(...counts)}` : "nothing seen yet";
  svg.setAttribute("aria-label", `messages that waited in the last hour: ${told}`);
  const drawn = document.createElementNS(svg.namespaceURI, "polyline");
  const at = (minute, count) => `${(59 + minute).toFixed(1)},${(19 - (18 * count) / most).toFixed(1)}`;
  const all = points.length === 1 ? [[points[0][0] - 1, points[0][1]], points[0]] : points;
  drawn.setAttribute("points", all.map(([minute, count]) => at(minute, count)).join(" "));
  svg.append(drawn);
  return svg;
}

const NUMBERS = new Set(["Attempt", "Attempts", "Bytes", "Waiting", "In flight", "Dead letters"]);

export function table(caption, heads, rows, { cls = "", empty = "nothing" } = {}) {
  const body = el("tbody", {}, rows.length ? rows : el("tr", {}, el("td", { colspan: heads.length, class: "soft" }, empty)));
  const made = el(
    "table", { class: cls }, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, heads.map((head) => (head instanceof Node ? head : el("th", { scope: "col", class: NUMBERS.has(head) ? "number" : null }, head))))),
    body,
  );
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, made);
}

let quiet = 0;
/** Says something to the user for a while. */
export function say(text) {
  document.getElementById("said").textContent = plain(text);
  clearTimeout(quiet);
  quiet = setTimeout(() => (document.getElementById("said").textContent = ""), 8000);
}

/** A dialog; resolves to true when it is confirmed. `ready` says whether it may be. */
export function ask(title, content, { confirm = "OK", bad = false, only = false, ready = () => true, act = null } = {}) {
  return new Promise((resolve) => {
    const wrong = el("p", { class: "dead", role: "alert" });
    const go = el("button", { class: bad ? "bad" : "main", value: "yes" }, confirm);
    const check = () => (go.disabled = !ready());
    const form = el(
      "form", { method: "dialog", oninput: check }, el("h2", { id: "asked" }, title), content, wrong,
      el("div", { class: "bar" },
        only ? null : el("button", { type: "button", onclick: () => box.close() }, "Cancel"), go),
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (go.disabled) return;
      go.disabled = true;
      try {
        if (act) await act();
        box.close("yes");
      } catch (error) {
        wrong.textContent = plain(error.message);
        go.disabled = false;
      }
    });
    const box = el("dialog", { "aria-labelledby": "asked" }, form);
    box.addEventListener("close", () => {
      box.remove();
      resolve(box.returnValue === "yes");
    });
    document.body.append(box);
    check();
    box.showModal();
  });
}
