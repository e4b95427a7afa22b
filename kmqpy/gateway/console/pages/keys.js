import { call } from "./api.js";
import { el, foreign, ago, table, ask, say, plain } from "./dom.js";

export function keysPage(me) {
  const mine = el(
    "dl", { class: "settings" },
    el("dt", {}, "Key"), el("dd", {}, me.id === "-" ? "none: this gateway asks for no keys" : foreign(me.id)),
    me.title ? [el("dt", {}, "Title"), el("dd", {}, foreign(me.title))] : null,
    el("dt", {}, "May"), el("dd", {}, me.permissions.map((one) => el("div", { class: "id" }, foreign(one)))),
  );
  const place = el("div");
  const nodes = [el("h1", {}, "Keys and rights"), el("h2", {}, "What you may do here"), el("div", { class: "card" }, mine), place];
  if (me.keeps_keys) load();
  else place.append(el("p", { class: "soft" }, "To make and revoke keys, sign in with a key of the role queue_admin at the gateway that keeps them, or use: kmq key"));

  async function load() {
    try {
      draw((await call("GET", "keys")).keys);
    } catch (error) {
      place.replaceChildren(el("p", { class: "notice", role: "alert" }, plain(error.message)));
    }
  }

  function draw(keys) {
    const rows = keys.map((one) => el(
      "tr", {}, el("th", { scope: "row", class: "id" }, foreign(one.id), one.own ? " (yours)" : ""),
      el("td", { class: "name" }, foreign(one.title)),
      el("td", { class: "id" }, [...one.roles, ...one.permissions].map((text) => el("div", {}, foreign(text)))),
      el("td", {}, ago(one.created_ms)),
      el("td", {}, el("button", { type: "button", class: "bad", "aria-label": `Revoke ${plain(one.id)}`, onclick: () => revoke(one) }, "Revoke…")),
    ));
    place.replaceChildren(
      el("h2", {}, "All keys"),
      el("div", { class: "bar" }, el("button", { type: "button", class: "main", onclick: () => create(keys) }, "Make a key…")),
      table("Keys of this gateway", ["Key", "Title", "May", "Made", ""].map((text) => text ? text : el("td", {}, "")), rows, { empty: "no keys: whoever can connect may do everything" }),
    );
  }

  async function revoke(one) {
    const text = one.own ? "This is the key with which you are signed in." : "Its clients are refused within 5 s.";
    const done = await ask(`Revoke key ${plain(one.id)}?`, [el("p", {}, foreign(one.title)), el("p", {}, text)],
      { confirm: "Revoke", bad: true, act: () => call("DELETE", `keys/${encodeURIComponent(one.id)}`) });
    if (done) {
      say("The key is revoked.");
      load();
    }
  }

  async function create(keys) {
    const title = el("input", { id: "title", maxlength: "200" });
    const role = el("select", { id: "role" }, Object.keys(me.roles).concat("").map((one) => el("option", { value: one }, one || "no role, only these permissions")));
    role.value = "queue_standard";
    const permissions = el("textarea", { id: "may", rows: "3", placeholder: "queue|post|mails-*" });
    let made = null;
    const lines = () => permissions.value.split("\n").map((one) => one.trim()).filter(Boolean);
    const content = [
      el("label", { for: "title" }, "Whose key it is"), title,
      el("label", { for: "role" }, "Role"), role,
      el("label", { for: "may" }, "Further permissions, one a line: queue|ACTION|NAME"), permissions,
      keys.length || me.id !== "-" ? null : el("p", { class: "notice" }, "This is the first key: from then on, nobody gets in without one. Give it the role queue_admin, and keep it."),
    ];
    const done = await ask("Make a key", content, {
      confirm: "Make it", ready: () => role.value || lines().length,
      act: async () => (made = await call("POST", "keys", { title: title.value, roles: role.value ? [role.value] : [], permissions: lines() })),
    });
    if (!done) return;
    await ask("The key", [el("p", {}, "It is shown this once, and stored nowhere:"), el("pre", { tabindex: "0", id: "secret" }, made.secret)], { confirm: "I have it", only: true });
    load();
  }

  return { title: "Keys", nodes };
}
