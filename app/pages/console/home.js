// The first page: how the jobs of a tenant are, what runs and what failed, over time and by tenant; then a line on the
// ledger.

import { get, getIfAllowed, query, readiness } from "./api.js";
import { count, facts, field, fill, h, panel, plural, refill, svg, table, tag, waiting } from "./dom.js";
import { STATUSES } from "./facts.js";
import { follow, jobLink, liveParts, statusTag, statusWords } from "./jobs.js";
import { ASK_EVERY_MS, banner, judged, keepUp, lastVerified, overview, tell } from "./overview.js";
import { named, pickTenant } from "./pick_tenant.js";
import { reportParts } from "./report.js";
import { ago, dated, duration, time } from "./times.js";

const HOUR_MS = 3_600_000;
const BARS_MAX = 48;
const HOURS_MAX = 1000;
const LISTED = 5;
const TENANTS_MAX = 20;
/** Figures are asked for after entries came, not by the clock: a read may be on record. */
const DRAW_AFTER_MS = 3000;
const TENANTS_AFTER_MS = 60_000;
/** By hours, in the order in which they are offered. */
const PERIODS = new Map([
  [1, "this hour and the last"],
  [24, "the last 24 hours"],
  [168, "the last 7 days"],
  [720, "the last 30 days"],
  [0, "all time"],
]);
const RUNNING = ["ACCEPTED", "RUNNING", "CANCELLING"];
const FAILED = ["FAILED", "TIMED_OUT"];
/** Whenever they were created: what runs for long fails late. */
const FAILED_LAST = { status: FAILED, sort: "ended_at", since: null };
const GROUPS = [
  ["bad", "failed", (status) => STATUSES[status] === "bad"],
  ["ok", "completed", (status) => STATUSES[status] === "ok"],
  ["", "others", (status) => !["ok", "bad"].includes(STATUSES[status])],
];

export async function home(ctx) {
  const { session, query: asked } = ctx;
  if (!session.may("read")) return overview(ctx);
  const { names } = await session.tenants();
  const isShown = (name) => name && name !== "_system" && session.may("read", name);
  const tenants = names.filter(isShown);
  const tenant = asked.get("tenant") || [sessionStorage.getItem("tenant"), ...tenants].find(isShown);
  const hours = PERIODS.has(Number(asked.get("hours") ?? NaN)) ? Number(asked.get("hours")) : 168;
  const address = (more) => `#/?${new URLSearchParams({ tenant, hours, ...more })}`;
  const period = h(
    "select",
    { name: "hours", onchange: (event) => location.assign(address({ hours: event.target.value })) },
    [...PERIODS].map(([each, name]) => h("option", { value: each, selected: each === hours }, name)),
  );
  const report = reportParts(ctx, tenant, { since: since(hours) });
  const places = {
    alarm: h("div"), // The line on the ledger, where something is wrong with it.
    ledger: h("div"),
    jobs: h("div", {}, waiting("Reading the figures")),
    tenants: h("div"),
    ...liveParts(),
  };
  ctx.show(
    "Overview",
    places.alarm,
    h("h1", {}, tenant ? `Jobs of ${tenant}` : "Jobs"),
    tenant &&
      h(
        "p",
        { class: "row fields actions" },
        await pickTenant(ctx, tenant, (name) => address({ tenant: name })),
        field("Period", period),
        h("span", { class: "row" }, places.live, places.pause, report.button),
      ),
    tenant && report.told,
    places.jobs,
    places.tenants,
    places.ledger,
  );
  const seen = { told: null, answeredAt: new Date(), tenantsAt: 0 };
  const draw = async () => {
    refill(places.jobs, await jobsOf(ctx, tenant, hours));
    if (Date.now() - seen.tenantsAt < TENANTS_AFTER_MS) return;
    seen.tenantsAt = Date.now();
    refill(places.tenants, await byTenant(ctx, tenants.slice(0, TENANTS_MAX), hours, address));
  };
  await Promise.all([keepUp(ctx, () => drawLedger(ctx, places, seen)), tenant && draw()]);
  if (tenant) follow(ctx, tenant, places, draw, DRAW_AFTER_MS);
  else fill(places.jobs, h("p", {}, "No tenant has an event yet. One begins with its first."));
}

/** Where a period begins: with an hour, as figures count whole ones. */
const since = (hours) => (hours ? new Date(Math.floor(Date.now() / HOUR_MS - hours) * HOUR_MS).toISOString() : null);

async function jobsOf(ctx, tenant, hours) {
  const ask = (path, more) => get(path, { tenant_id: tenant, since: since(hours), ...more }, ctx.signal);
  let answers;
  try {
    answers = await Promise.all([
      ask("/v1/jobs/summary", { by: "hour", limit: HOURS_MAX }),
      ask("/v1/jobs/summary", { by: "error", limit: LISTED }),
      ask("/v1/jobs", { ...FAILED_LAST, limit: LISTED }),
      ask("/v1/jobs", { status: RUNNING, limit: LISTED, since: null }),
    ]);
  } catch (error) {
    if (error.kind !== "tenant-not-found") throw error;
    return h("p", {}, `${tenant} has no event yet. Its jobs show here once the first one comes.`);
  }
  const [counts, errors, failed, running] = answers;
  const { all } = counts;
  const listed = (asked = {}) => `#/jobs/${named(tenant)}?${query({ since: since(hours), ...asked })}`;
  if (!all.jobs)
    return h(
      "p",
      {},
      `${tenant} has no job that was created in ${PERIODS.get(hours)}. `,
      hours > 0 && h("a", { href: `#/?${query({ tenant, hours: 0 })}` }, "All time"),
    );
  return [
    h(
      "ul",
      { class: "tiles" },
      h("li", {}, h("a", { href: listed() }, h("b", {}, count(all.jobs)), all.jobs === 1 ? "job" : "jobs")),
      Object.keys(STATUSES)
        .filter((status) => all.statuses[status])
        .map((status) =>
          h(
            "li",
            { class: STATUSES[status] },
            h("a", { href: listed({ status }) }, h("b", {}, count(all.statuses[status])), statusWords(status)),
          ),
        ),
    ),
    h(
      "div",
      { class: "grid" },
      panel("Created over time", chart(counts, hours)),
      panel("Run time", runTimes(all.run_times), h("p", { class: "soft apart" }, asOf(counts))),
    ),
    h(
      "div",
      { class: "grid" },
      panel(
        null,
        shortList("Failed", "the last to end", tenant, failed.items, { name: "Error", of: (job) => errorOf(job.error) }),
        failed.items.length > 0 &&
          h("p", {}, h("a", { href: listed({ ...FAILED_LAST, order: "desc" }) }, "All that failed, the last to end first")),
      ),
      h(
        "div",
        {},
        panel(
          null,
          shortList("Running", "the newest", tenant, running.items, {
            name: "State",
            of: (job) => [statusTag(job.status), " ", job.assigned_dcs.join(", ")],
          }),
        ),
        errors.groups.length > 0 && panel(null, errorCounts(errors, (error) => listed({ status: FAILED, error }))),
      ),
    ),
  ];
}

const errorOf = (error) => (typeof error === "string" ? error : error ? JSON.stringify(error) : "no error was given");
const asOf = ({ consistency, all }) => [
  `Counted up to entry ${count(consistency.as_of_seq)}. `,
  all.by_trace_time > 0 &&
    `${plural(all.by_trace_time, "job")} by the times in their events (trace_time), not by when these were recorded.`,
];

function runTimes(times) {
  if (!times) return h("p", {}, "No job ran from its acceptance to its end.");
  return facts({
    Median: duration(times.p50_ms),
    "95 % within": duration(times.p95_ms),
    Longest: duration(times.max_ms),
    Shortest: duration(times.min_ms),
    Of: `${plural(times.jobs, "job")}, from acceptance to end`,
  });
}

function shortList(title, first, tenant, items, last) {
  if (!items.length) return [h("h2", {}, title), h("p", {}, "None.")];
  const columns = [
    { name: "Job", heads: true, of: (job) => jobLink(tenant, job) },
    {
      name: "Last event",
      of: (job) => [time(job.last_at, job.last_hlc), h("div", { class: "soft" }, ago(job.last_at))],
    },
    last,
  ];
  return table(`${title}, ${first} first`, columns, items);
}

function errorCounts({ groups }, address) {
  const columns = [
    { name: "Error", heads: true, of: ({ value }) => (value ? h("a", { href: address(value) }, value) : "none, or private") },
    { name: "Jobs", number: true, of: (group) => count(group.jobs) },
  ];
  return table("By error, the most frequent first", columns, groups);
}

/** Bars of as many hours each that at most BARS_MAX cover the period: `{at, jobs, parts}`, `parts` as GROUPS has them. */
export function barsOf(groups, first, end) {
  const size = Math.max(1, Math.ceil((end - first) / HOUR_MS / BARS_MAX)) * HOUR_MS;
  const bars = Array.from({ length: Math.max(1, Math.ceil((end - first) / size)) }, (_, nth) => ({
    at: first + nth * size,
    jobs: 0,
    parts: GROUPS.map(() => 0),
  }));
  for (const { value, jobs, statuses } of groups) {
    const bar = bars[Math.floor((Date.parse(value) - first) / size)];
    if (!bar) continue;
    bar.jobs += jobs;
    for (const [status, number] of Object.entries(statuses))
      bar.parts[GROUPS.findIndex(([, , is]) => is(status))] += number;
  }
  return bars;
}

function chart({ groups, since: from, groups_left_out: leftOut }, period) {
  const known = groups.filter(({ value }) => value);
  if (!known.length) return h("p", {}, "No job has a time of creation.");
  const at = known.map(({ value }) => Date.parse(value));
  const first = from ? Date.parse(from) : Math.min(...at);
  const end = period ? Math.max(Date.now(), ...at) : Math.max(...at) + HOUR_MS;
  const bars = barsOf(known, first, end);
  const most = Math.max(...bars.map((bar) => bar.jobs));
  const shown = bars.filter((bar) => bar.jobs);
  const columns = [
    { name: "From", heads: true, of: (bar) => dated(new Date(bar.at).toISOString()) },
    { name: "Jobs", number: true, of: (bar) => count(bar.jobs) },
    ...GROUPS.map(([, name], nth) => ({ name, number: true, of: (bar) => count(bar.parts[nth]) })),
  ];
  const hours = bars.length > 1 ? (bars[1].at - bars[0].at) / HOUR_MS : 1;
  const caption = `Jobs created in each ${hours === 1 ? "hour" : duration(hours * HOUR_MS)}`;
  return [
    h("p", { class: "soft" }, `${caption}, at most ${count(most)}`),
    svg(
      "svg",
      {
        class: "bars",
        viewBox: `0 0 ${bars.length * 10} 100`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${caption}, at most ${count(most)}; the table has the numbers`,
      },
      bars.map((bar, nth) => barAt(bar, nth * 10, most)),
    ),
    h(
      "p",
      { class: "row between soft" },
      dated(new Date(first).toISOString()),
      dated(new Date(end).toISOString()),
    ),
    h(
      "ul",
      { class: "tags" },
      GROUPS.map(([kind, name]) => h("li", {}, tag(name, kind))),
    ),
    leftOut > 0 && h("p", { class: "soft" }, `The newest ${HOURS_MAX} hours that have jobs.`),
    h("details", {}, h("summary", {}, "As a table"), table(caption, columns, shown)),
  ];
}

function barAt(bar, x, most) {
  let top = 100;
  return GROUPS.map(([kind], nth) => {
    const height = (bar.parts[nth] / most) * 96;
    top -= height;
    return height > 0 && svg("rect", { x: x + 1, y: top, width: 8, height, class: kind || "other" });
  });
}

async function byTenant(ctx, names, hours, address) {
  if (names.length < 2) return null;
  const asked = names.map((name) =>
    getIfAllowed("/v1/jobs/summary", { tenant_id: name, since: since(hours) }, ctx.signal),
  );
  const rows = (await Promise.all(asked)).filter((found) => found?.all.jobs);
  if (!rows.length) return null;
  const sum = ({ all }, statuses) => statuses.reduce((total, status) => total + (all.statuses[status] ?? 0), 0);
  const columns = [
    { name: "Tenant", heads: true, of: (row) => h("a", { href: address({ tenant: row.tenant_id }) }, row.tenant_id) },
    { name: "Jobs", number: true, of: (row) => count(row.all.jobs) },
    { name: "Running", number: true, of: (row) => count(sum(row, RUNNING)) },
    { name: "Failed", number: true, of: (row) => count(sum(row, FAILED)) },
    {
      name: "Median run time",
      number: true,
      of: (row) => (row.all.run_times ? duration(row.all.run_times.p50_ms) : "–"),
    },
    { name: "95 % within", number: true, of: (row) => (row.all.run_times ? duration(row.all.run_times.p95_ms) : "–") },
  ];
  return panel(null, table(`Jobs by tenant, ${PERIODS.get(hours)}`, columns, rows));
}

/** One line on the ledger: whether it is whole, when all was last verified, and what waits. */
async function drawLedger(ctx, places, seen) {
  try {
    const [state, node] = await Promise.all([readiness(ctx.signal), getIfAllowed("/v1/node", {}, ctx.signal)]);
    const { kind, said, more, faults } = judged(state);
    const waits = node && node.positions.commit_lsn - node.positions.chained_lsn;
    const line = [
      node && h("p", {}, waits > 0 ? `${plural(waits, "event")} to be chained. ` : "Nothing waits to be chained. "),
      lastVerified(state.verified),
      h("p", {}, h("a", { href: "#/ledger" }, "All about the ledger")),
    ];
    seen.answeredAt = new Date();
    const shown = banner(kind, said, more, line, "h2");
    refill(places.alarm, kind !== "ok" && shown);
    refill(places.ledger, kind === "ok" && shown);
    tell(ctx, seen, "Overview", faults.length ? `${said}: ${more}` : said, faults.length > 0);
  } catch (error) {
    if (error.name === "AbortError") return;
    const at = time(seen.answeredAt.toISOString());
    const text = h(
      "span",
      {},
      "No answer since ",
      at,
      `: what is shown is of then. This page asks again every ${ASK_EVERY_MS / 1000} seconds.`,
    );
    refill(places.alarm, banner("bad", "The service does not answer", text, null, "h2"));
    fill(places.ledger);
    tell(ctx, seen, "Overview", "The service does not answer", true);
  }
}
