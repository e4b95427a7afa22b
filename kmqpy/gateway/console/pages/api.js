// Calls of the gateway. The key is kept for this tab only, and sent in a header: no other page can use it.

const KEY = "kmq-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  drop: () => sessionStorage.removeItem(KEY),
};

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

function headers(more = {}) {
  return key.get() ? { ...more, Authorization: `Bearer ${key.get()}` } : more;
}

async function answered(response) {
  if (response.ok) return response.status === 204 ? null : response.json();
  let detail = `the gateway answers ${response.status}`;
  try {
    detail = (await response.json()).detail ?? detail;
  } catch { /* no problem details */ }
  if (response.status === 401) dispatchEvent(new CustomEvent("kmq-out", { detail }));
  throw new Problem(response.status, detail);
}

/** A call: `path` is relative to the console's; `body` becomes JSON, unless it is text. */
export async function call(method, path, body, more = {}) {
  const given = body === undefined ? {} : { body: typeof body === "string" ? body : JSON.stringify(body) };
  const type = body === undefined || "Content-Type" in more ? {} : { "Content-Type": "application/json" };
  let response;
  try {
    response = await fetch(path, { method, ...given, headers: headers({ ...type, ...more }), cache: "no-store" });
  } catch {
    throw new Problem(0, "the gateway can't be reached");
  }
  return answered(response);
}

export const queuePath = (queue, rest) => `../v1/queues/${encodeURIComponent(queue)}${rest}`;

/** Events of `live`, again and again until the signal aborts. `state` is told "live" or "lost". */
export async function live(queue, signal, onEvent, state) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      const query = queue ? `?queue=${encodeURIComponent(queue)}` : "";
      const response = await fetch(`live${query}`, { headers: headers(), signal, cache: "no-store" });
      if (!response.ok) await answered(response);
      state("live");
      wait = 500;
      await read(response.body.pipeThrough(new TextDecoderStream()).getReader(), onEvent);
    } catch (error) {
      if (error.status === 401 || error.status === 403) return;
    }
    if (signal.aborted) return;
    state("lost");
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, 10000);
  }
}

async function read(reader, onEvent) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("event: out")) await answered(new Response("{}", { status: 401 }));
      onEvent(JSON.parse(event.slice(event.indexOf("data: ") + 6)));
    }
  }
}
