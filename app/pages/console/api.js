// The public API, asked as any client asks it. The cookie of a session goes with each request by itself.

import { JOB_ACTIONS } from "./facts.js";

/** An answer that is not the one asked for (RFC 9457). */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the service answers ${status}`);
    this.status = status;
    this.kind = (body.type || "").split("/").pop();
    this.title = body.title || "The service did not answer as it should";
    this.body = body;
  }
}

/** The service could not be reached. */
export class Unreachable extends Error {}

export const signedOut = new EventTarget();

const REOPEN_AFTER_MS = 5000;
const RECONNECT_AFTER_MS = 1000;
/** The node sends something every 15 seconds at the latest. */
const SILENT_AFTER_MS = 40_000;

/** Parameters of an address, those left out that say nothing; a list is several of one name. */
export function query(given) {
  const said = Object.entries(given)
    .flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((each) => [name, each]))
    .filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return new URLSearchParams(said);
}

export function address(path, asked = {}) {
  const said = query(asked);
  return said.size ? `${path}?${said}` : path;
}

/** The raw answer; whatever its status is. */
async function answer(method, path, { query, json, body, accept, signal, headers: more } = {}) {
  const headers = {
    ...more,
    ...(json === undefined ? {} : { "Content-Type": "application/json" }),
    ...(accept ? { Accept: accept } : {}),
  };
  try {
    return await fetch(address(path, query).slice(1), {
      method,
      headers,
      signal,
      body: json === undefined ? body : JSON.stringify(json),
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the service does not answer");
  }
}

async function problemOf(got) {
  const body = await got.json().catch(() => ({}));
  const problem = new Problem(got.status, body);
  if (got.status === 401) signedOut.dispatchEvent(new CustomEvent("signed-out", { detail: problem }));
  return problem;
}

/** The answer of an operation: JSON, else text. Raises Problem or Unreachable. */
export async function ask(method, path, given = {}) {
  const got = await answer(method, path, given);
  if (!got.ok) throw await problemOf(got);
  const isJson = (got.headers.get("Content-Type") || "").startsWith("application/json");
  try {
    return await got[given.as ?? (isJson ? "json" : "text")]();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the answer ended before it was whole");
  }
}

export const get = (path, query, signal) => ask("GET", path, { query, signal });

/** An answer if the caller may have it, else null. */
export async function getIfAllowed(path, query, signal) {
  try {
    return await get(path, query, signal);
  } catch (error) {
    if (error instanceof Problem && [401, 403, 404].includes(error.status)) return null;
    throw error;
  }
}

/** Have the browser save what an operation answers as a file. */
export async function save(method, path, name, given = {}) {
  saveBlob(await ask(method, path, { ...given, as: "blob" }), name);
}

export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** What `/readyz` says, also where that is that the node is not ready. */
export async function readiness(signal) {
  const got = await answer("GET", "/readyz", { signal });
  const body = await got.json().catch(() => ({}));
  if (!body.checks) throw new Problem(got.status, body);
  return { ready: got.ok, checks: body.checks, verified: body.verified };
}

/** All samples of `/metrics` by name, those with labels added up; null where the caller may not read it. */
export async function metrics(signal) {
  const text = await getIfAllowed("/metrics", {}, signal);
  if (text === null) return null;
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{[^}]*\})? ([^ ]+)$/i.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) || 0) + Number(match[2]));
  }
  return found;
}

/**
 * Entries of a chain as they come, until `signal` is aborted: `onEntry(entry)`, `onState(is_open, heard_at)`. While
 * the page is in the background there is none, as a browser has six connections to a service for all of its tabs.
 *
 * Read by hand: the browser's EventSource hides the comments by which the node shows every 15 seconds that the stream is
 * alive, so behind a proxy that went silent it stays open for ever. `heard_at` is when the last byte came, at first when
 * the page was drawn.
 */
export function watch(query, signal, onEntry, onState) {
  let reading = null;
  let timer = null;
  let heardAt = new Date();
  let lastId = null;
  const close = () => {
    clearTimeout(timer);
    reading?.abort();
    reading = null;
  };
  const closed = (reopenAfterMs, from) => {
    onState(false, heardAt);
    timer = setTimeout(() => open(from), reopenAfterMs);
  };
  const open = async (from) => {
    const mine = new AbortController();
    reading = mine;
    let silence;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => mine.abort("silent"), SILENT_AFTER_MS);
    };
    listen();
    let isOpen = false;
    const onBytes = () => {
      heardAt = new Date();
      if (!isOpen) onState(true, heardAt);
      isOpen = true;
      listen();
    };
    let next;
    try {
      const asked = from ? { ...query, from_seq: from } : query;
      const headers = !from && lastId ? { "Last-Event-ID": lastId } : {};
      const got = await answer("GET", "/v1/watch", { query: asked, headers, signal: mine.signal });
      if (!got.ok) throw await problemOf(got);
      for await (const event of serverSentEvents(got.body, onBytes)) {
        lastId = event.id ?? lastId;
        if (event.name === "lagged") next = JSON.parse(event.data).from_seq;
        else if (JOB_ACTIONS.includes(event.name)) onEntry(JSON.parse(event.data));
      }
      if (reading === mine) closed(next ? 0 : RECONNECT_AFTER_MS, next);
    } catch (error) {
      if (reading !== mine) return;
      const isSilent = mine.signal.reason === "silent";
      closed(isSilent ? 0 : error instanceof Problem ? REOPEN_AFTER_MS : RECONNECT_AFTER_MS);
    } finally {
      clearTimeout(silence);
    }
  };
  const follow = () => {
    close();
    if (document.hidden) onState(false, heardAt);
    else open();
  };
  follow();
  document.addEventListener("visibilitychange", follow, { signal });
  signal.addEventListener("abort", close);
}

/** The events of a stream (WHATWG HTML, server-sent events) as the node writes them; `onBytes` is told of any bytes. */
async function* serverSentEvents(body, onBytes) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let got; !(got = await reader.read()).done;) {
      onBytes();
      const blocks = (rest + got.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const fields = block.split("\n").map((line) => line.split(/: ?(.*)/s));
        const value = (name) => fields.find((field) => field[0] === name)?.[1];
        yield { id: value("id"), name: value("event"), data: value("data") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** `draw`, one at a time and once more where it was asked for meanwhile: no older answer is drawn over a newer one. */
export function oneAtATime(draw) {
  let drawing = null;
  let isAsked = false;
  const all = async () => {
    while (isAsked) {
      isAsked = false;
      await draw();
    }
  };
  return () => {
    isAsked = true;
    drawing ??= all().finally(() => {
      drawing = null;
    });
    return drawing;
  };
}
