// Jobs of a tenant: searched, paged, and followed as they come.

import { address, get, oneAtATime, save, watch } from "./api.js";
import { field, fill, h, panel, plural, refill, table, tag, waiting } from "./dom.js";
import { STATUSES } from "./facts.js";
import { named, pickTenant } from "./pick_tenant.js";
import { reportParts } from "./report.js";
import { ago, duration, fromLocal, time, toLocal } from "./times.js";

const PAGE = 50;
/** What the form offers besides each status by itself. */
const FAILED_ANYHOW = "FAILED TIMED_OUT";
/** Which job comes first, by `sort` and `order` of the API. */
const ORDERS = {
  "created_at desc": "the newest",
  "created_at asc": "the oldest",
  "ended_at desc": "the last to end",
  "ended_at asc": "the first to end",
  "run_ms desc": "the longest",
  "run_ms asc": "the shortest",
};
const NONE_YET = { items: [], damaged: [], next_cursor: null, total: 0, isNew: true };
const REFRESH_AFTER_MS = 600;
const DRAW_AGAIN_AFTER_MS = 5000;

export const statusWords = (status) => status.toLowerCase().replace("_", " ");
export const statusTag = (status) => tag(statusWords(status), STATUSES[status] ?? "");

export async function jobs(ctx) {
  const [name] = ctx.rest;
  const places = {
    list: h("div", { tabindex: "-1" }, waiting("Reading the jobs")),
    ...liveParts(),
    told: h("p", { role: "alert" }),
  };
  const cursor = ctx.query.get("cursor");
  const report = reportParts(ctx, name, { since: ctx.query.get("since"), until: ctx.query.get("until") });
  ctx.show(
    `Jobs of ${name}`,
    h("h1", {}, "Jobs"),
    h("button", { type: "button", class: "skip", onclick: () => places.list.focus() }, "Skip to the jobs"),
    await searchForm(ctx, name),
    h(
      "p",
      { class: "row between" },
      cursor
        ? h("a", { href: `#/jobs/${named(name)}?${without(ctx.query, "cursor", "seen")}` }, `To ${orderOf(ctx.query)}`)
        : h("span", { class: "row" }, places.live, places.pause),
      h(
        "span",
        { class: "row" },
        report.button,
        h(
          "button",
          { type: "button", class: "quiet actions", onclick: (event) => download(ctx, name, event.target, places.told) },
          "Save as CSV",
        ),
      ),
    ),
    places.told,
    report.told,
    places.list,
  );
  const drawn = { isFirst: true, last: new Map() };
  const draw = async () => drawJobs(ctx, name, places, drawn, await found(ctx, name, cursor));
  await draw();
  if (!cursor) follow(ctx, name, places, draw);
}

/** Where `follow` says whether a page is live, and the button that pauses it. */
export const liveParts = () => ({
  live: h("span", { class: "live" }, "not live"),
  pause: h("button", { type: "button", class: "quiet actions", "aria-pressed": "false" }, "Pause"),
});

/** What the address asks for, as the API has it. */
function asked(query) {
  const said = { status: query.getAll("status"), where: query.getAll("where") };
  for (const name of ["id_part", "actor", "since", "until", "dc", "error", "in_conflict", "sort", "order"])
    said[name] = query.get(name);
  return said;
}

/** A page of jobs, and how many there are where figures say so; none of a tenant that has no event yet. */
async function found(ctx, name, cursor) {
  const { status, dc, sort, order, ...more } = asked(ctx.query);
  const isCounted = isByCreation(ctx.query) && Object.values(more).every((value) => !value?.length);
  try {
    const [page, figures] = await Promise.all([
      get("/v1/jobs", { tenant_id: name, limit: PAGE, cursor, ...asked(ctx.query) }, ctx.signal),
      isCounted && get("/v1/jobs/summary", { tenant_id: name, dc }, ctx.signal),
    ]);
    const counts = figures && Object.entries(figures.all.statuses);
    const wanted = counts && counts.filter(([each]) => !status.length || status.includes(each));
    return { ...page, total: wanted ? wanted.reduce((sum, [, jobs]) => sum + jobs, 0) : null };
  } catch (error) {
    if (error.kind === "tenant-not-found") return NONE_YET;
    throw error;
  }
}

const isByCreation = (query) => (query.get("sort") ?? "created_at") === "created_at";
const orderKey = (query) => `${query.get("sort") ?? "created_at"} ${query.get("order") ?? "desc"}`;
const orderOf = (query) => ORDERS[orderKey(query)] ?? "the first";

function without(query, ...names) {
  const rest = new URLSearchParams(query);
  for (const name of names) rest.delete(name);
  return rest;
}

async function searchForm(ctx, name) {
  const { query } = ctx;
  const text = (label, key, more = {}) => {
    const given = { name: key, autocomplete: "off", spellcheck: "false", ...more };
    return (query.has(key) ? query.getAll(key) : [""]).map((value) => field(label, h("input", { ...given, value })));
  };
  const when = (label, key) =>
    field(label, h("input", { type: "datetime-local", name: key, value: toLocal(query.get(key)) }));
  const chosen = query.getAll("status").join(" ");
  const statuses = new Set([...Object.keys(STATUSES), FAILED_ANYHOW, ...(chosen ? [chosen] : [])]);
  const wide = window.matchMedia("(min-width: 46rem)").matches;
  const form = h(
    "form",
    { class: "row", role: "search", "aria-label": "Search jobs", onsubmit: (event) => search(event, query) },
    await pickTenant(ctx, name, (tenant) => `#/jobs/${named(tenant)}`),
    text("Id or name has", "id_part"),
    field(
      "Status",
      h(
        "select",
        { name: "status" },
        h("option", { value: "" }, "any"),
        [...statuses].map((each) => h("option", { value: each, selected: each === chosen }, anyOf(each))),
      ),
    ),
    when("Created since", "since"),
    when("Created before", "until"),
    text("Created by", "actor"),
    text("Data centre", "dc"),
    text("Field", "where", { placeholder: "spec.image:report:1" }),
    text("Error has", "error"),
    field(
      "Only in conflict",
      h("input", {
        type: "checkbox",
        name: "in_conflict",
        value: "true",
        checked: query.get("in_conflict") === "true",
      }),
    ),
    field(
      "Order",
      h(
        "select",
        { name: "sort" },
        Object.entries(ORDERS).map(([key, first]) =>
          h("option", { value: key, selected: key === orderKey(query) }, `${first} first`),
        ),
      ),
    ),
    h("button", { class: "main" }, "Search"),
    query.size > 0 && h("a", { class: "button quiet", href: `#/jobs/${named(name)}` }, "Clear"),
  );
  return h("details", { class: "panel", open: wide || query.size > 0 }, h("summary", {}, `Search in ${name}`), form);
}

const anyOf = (statuses) => statuses.split(" ").map(statusWords).join(" or ");

/** To the address of what the form says. A time that was not touched stays as it is, to the millisecond. */
function search(event, query) {
  event.preventDefault();
  const said = new URLSearchParams();
  const { tenant } = event.target.elements;
  for (const [key, value] of new FormData(event.target)) {
    const isTime = key === "since" || key === "until";
    const isKept = isTime && query.get(key) && value === toLocal(query.get(key));
    const wanted = isKept ? query.get(key) : isTime ? fromLocal(value) : value.trim();
    const [sort, order] = wanted.split(" ");
    if (key === "status") for (const each of wanted.split(" ").filter(Boolean)) said.append(key, each);
    else if (key !== "sort") {
      if (wanted && key !== "tenant") said.append(key, wanted);
    } else if (wanted !== Object.keys(ORDERS)[0]) {
      said.append("sort", sort);
      said.append("order", order);
    }
  }
  location.assign(`#/jobs/${named(tenant.value.trim())}${said.size ? `?${said}` : ""}`);
}

function drawJobs(ctx, name, places, drawn, page) {
  const { isFirst, last } = drawn;
  drawn.isFirst = false;
  const fresh = (item) => {
    const isNew = !isFirst && last.get(item.job_id) !== item.last_hlc;
    last.set(item.job_id, item.last_hlc);
    return isNew && "fresh";
  };
  const seen = Number(ctx.query.get("seen") ?? 0) + page.items.length;
  const next = page.next_cursor && new URLSearchParams(ctx.query);
  if (next) {
    next.set("cursor", page.next_cursor);
    next.set("seen", seen);
  }
  const total = page.total === null ? `${next ? "more than " : ""}${plural(seen, "job")}` : plural(page.total, "job");
  const caption = `Jobs of ${name}, ${orderOf(ctx.query)} first; found: ${total}`;
  refill(
    places.list,
    page.items.length
      ? panel(null, table(caption, columns(name), page.items, { kind: fresh }))
      : panel(null, h("p", {}, nothing(name, page))),
    page.damaged.length > 0 &&
      panel(
        "Damaged: what is stored of these jobs is not what was chained",
        ...page.damaged.map((job) => h("p", {}, `${job.job_id}: ${job.detail}`)),
      ),
    next &&
      h("a", { class: "button", href: `#/jobs/${named(name)}?${next}` }, page.items.length ? "More jobs" : "Search on"),
  );
  if (isFirst) ctx.say(total);
}

function nothing(name, { isNew, next_cursor: next }) {
  if (isNew) return `${name} has no event yet. Its jobs show here as soon as the first one comes.`;
  return next ? "None among the jobs that were searched so far." : "There is no such job.";
}

/** To a job, by its id, and its name where it has one. */
export const jobLink = (tenant, { job_id: id, name }) =>
  h("a", { href: `#/job/${named(tenant)}/${named(id)}` }, id, name && [" ", h("span", { class: "name" }, name)]);

const columns = (name) => [
  { name: "Job", heads: true, of: (job) => jobLink(name, job) },
  {
    name: "Status",
    of: (job) => [statusTag(job.status), job.conflicts.length > 0 && [" ", tag("conflict", "warn")]],
  },
  { name: "Created", minor: true, of: (job) => time(job.created_at, job.created_hlc ?? "") },
  {
    name: "Last event",
    of: (job) => [time(job.last_at, job.last_hlc), " ", h("span", { class: "soft nowrap" }, ago(job.last_at))],
  },
  { name: "Run time", number: true, of: (job) => (job.run_ms === null ? "–" : duration(job.run_ms)) },
  { name: "Created by", minor: true, of: (job) => shownActor(job.actor) },
  { name: "Data centres", minor: true, of: (job) => job.assigned_dcs.join(", ") || "–" },
  { name: "Outcome", of: (job) => outcome(job) },
];

/** Who, or that it is sealed; the API gives a private one as an object. */
export const shownActor = (actor) =>
  actor === null || actor === undefined ? "–" : typeof actor === "string" ? actor : "private";

function outcome(job) {
  const text =
    job.error ??
    job.result?.final_status ??
    (job.completed || job.failed ? `${job.completed} done, ${job.failed} failed` : "–");
  return typeof text === "string" ? text : JSON.stringify(text);
}

/** Draw again so long after an entry of a job came, once for many; not while the reader has paused it. */
export function follow(ctx, name, places, draw, afterMs = REFRESH_AFTER_MS) {
  let timer = null;
  let isPaused = false;
  let isBehind = false;
  let live = [false, new Date()];
  const redraw = oneAtATime(async () => {
    try {
      await draw();
      showLive(places.live, ...live);
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(places.live, `Not as it is now: ${error.message}`);
      timer ??= setTimeout(again, DRAW_AGAIN_AFTER_MS);
    }
  });
  const again = () => {
    timer = null;
    isBehind = isPaused;
    if (!isPaused) redraw();
  };
  places.pause.addEventListener("click", () => {
    isPaused = !isPaused;
    places.pause.setAttribute("aria-pressed", String(isPaused));
    if (isBehind) again();
  });
  ctx.signal.addEventListener("abort", () => clearTimeout(timer));
  const soon = () => {
    timer ??= setTimeout(again, afterMs);
  };
  watch({ tenant_id: name }, ctx.signal, soon, (isOpen, heardAt) => {
    // What came between the page and the stream is drawn once that is open.
    if (isOpen && !live[0]) soon();
    live = [isOpen, heardAt];
    showLive(places.live, ...live);
  });
}

/** Say whether a page follows what happens, and since when it does not: `heardAt` is when the last byte came. */
export function showLive(place, isOpen, heardAt) {
  place.classList.toggle("on", isOpen);
  if (isOpen) fill(place, "Live: changes show as they come");
  else fill(place, "Not live since ", time(heardAt.toISOString()), ": the stream is being opened again");
}

async function download(ctx, name, button, told) {
  button.disabled = true;
  fill(told);
  try {
    await save("GET", address("/v1/jobs", { tenant_id: name, ...asked(ctx.query) }), `${name}.jobs.csv`, {
      accept: "text/csv",
    });
  } catch (error) {
    fill(told, `Not saved: ${error.message}`);
  } finally {
    button.disabled = false;
  }
}
