// One job: what it is, what happened to it when by whom, and its receipt.

import { BREAKS } from "./advice.js";
import { address, get, oneAtATime, save, watch } from "./api.js";
import { count, facts, fill, h, json, panel, refill, short, table, tag, waiting } from "./dom.js";
import { EVENTS } from "./facts.js";
import { showLive, shownActor, statusTag, statusWords } from "./jobs.js";
import { named } from "./pick_tenant.js";
import { ago, duration, time } from "./times.js";
import { belowQuorum, witnessesOf } from "./witnesses.js";

const EVENTS_PAGE = 500;
const RUNS_MAX = 12;
const QUORUM_WAIT_S = 5;
const FIELD = /\{(\w+)\}/g;
const STATES = {
  GLOBAL: ["chained", "", "in the tenant's chain"],
  APPLIED: ["chained", "", "in the tenant's chain, and in the table of jobs"],
  COMPACTED: ["signed", "ok", "in the chain, and covered by a signed batch"],
};

export async function job(ctx) {
  const [tenant, id] = ctx.rest;
  const places = {
    verdict: h("div", {}, ctx.session.may("audit", tenant) && waiting("Verifying its entries")),
    head: h("div", {}, waiting("Reading the job")),
    status: h("span"),
    live: h("span", { class: "live" }, "not live"),
    told: h("div"), // One place: nothing grows above what is pressed in it.
  };
  ctx.show(
    id,
    h("p", {}, h("a", { href: `#/jobs/${named(tenant)}` }, `Jobs of ${tenant}`)),
    h("h1", {}, id),
    places.verdict,
    places.head,
    places.told,
  );
  let lastSeq = 0;
  const draw = async () => {
    const about = { tenant_id: tenant };
    const [state, events] = await Promise.all([
      get(`/v1/jobs/${named(id)}`, about, ctx.signal),
      get(`/v1/jobs/${named(id)}/events`, { ...about, limit: EVENTS_PAGE }, ctx.signal),
    ]);
    lastSeq = state.last_seq;
    refill(places.status, statusTag(state.status));
    refill(places.told, summary(ctx, tenant, state, events.items), panel("Timeline", timeline(ctx, tenant, events)));
    return events.items.map((event) => event.seq);
  };
  const seqs = await draw();
  fill(places.head, actions(ctx, tenant, id, places, () => lastSeq));
  const notVerified = (error) =>
    error.name !== "AbortError" && fill(places.verdict, h("p", { class: "soft" }, `Not verified: ${error.message}`));
  verified(ctx, tenant, seqs)
    .then((found) => fill(places.verdict, found))
    .catch(notVerified);
  const again = oneAtATime(() => draw().catch(() => {}));
  let isLive = false;
  // Once it is open nothing is missed: what came since the page was drawn is drawn then.
  watch(
    { tenant_id: tenant, job: id },
    ctx.signal,
    (entry) => {
      ctx.say(`${id}: ${entry.action}`);
      again();
    },
    (isOpen, heardAt) => {
      showLive(places.live, isOpen, heardAt);
      if (isOpen && !isLive) again();
      isLive = isOpen;
    },
  );
}

/** What verifying the job's own entries comes to; nothing for who may not verify. */
async function verified(ctx, tenant, seqs) {
  if (!ctx.session.may("audit", tenant)) return null;
  const runs = [];
  for (const seq of [...seqs].sort((one, other) => one - other)) {
    if (runs.length && seq === runs.at(-1)[1] + 1) runs.at(-1)[1] = seq;
    else runs.push([seq, seq]);
  }
  for (const [from, to] of runs.slice(0, RUNS_MAX)) {
    const { valid, first_break: broken } = await get(
      "/v1/chain/verify",
      { tenant_id: tenant, from_seq: from, to_seq: to },
      ctx.signal,
    );
    if (valid) continue;
    const at = broken?.seq ?? from;
    return h(
      "div",
      { class: "banner bad", role: "alert" },
      h("span", { class: "mark", "aria-hidden": "true" }, "✕"),
      h(
        "div",
        {},
        h("h2", {}, "What stands here does not hold"),
        h("p", {}, broken ? `${BREAKS[broken.kind] ?? broken.kind} ` : "", "This is ", entryLink(ctx, tenant, at), "."),
      ),
    );
  }
  const left = Math.max(0, runs.length - RUNS_MAX);
  return h(
    "p",
    {},
    tag("✓ verified", "ok"),
    h(
      "span",
      { class: "soft" },
      left
        ? ` its first entries, just now; ${count(left)} more places in the chain were not verified.`
        : ` its entries up to ${count(Math.max(...seqs))}, when the page was opened: content, links and signatures hold.`,
    ),
  );
}

/** To where an entry is shown as it is stored, for who may see that. */
function entryLink(ctx, tenant, seq) {
  const text = `entry ${count(seq)}`;
  return ctx.session.may("audit", tenant)
    ? h("a", { href: `#/verify/${named(tenant)}?at=${seq}` }, text)
    : h("span", {}, text);
}

function actions(ctx, tenant, id, places, lastSeq) {
  const told = h("span", { role: "alert" });
  let saving = null;
  const receipt = async () => {
    fill(told);
    try {
      const about = { tenant_id: tenant, wait_s: QUORUM_WAIT_S };
      await save("GET", address(`/v1/jobs/${named(id)}/receipt`, about), `${id}.receipt.json`);
      ctx.say("The receipt is downloaded");
      fill(told, belowQuorum(await witnessesOf(ctx, tenant), lastSeq()));
    } catch (error) {
      fill(told, error.message);
    }
    saving = null;
  };
  return h(
    "p",
    { class: "row actions" },
    places.status,
    h("button", { type: "button", class: "main", onclick: () => (saving ??= receipt()) }, "Download the receipt"),
    told,
    places.live,
    h(
      "span",
      { class: "soft" },
      "One file that proves this job, alone and offline: ",
      h("a", { href: "verify" }, "verify it"),
      " anywhere.",
    ),
  );
}

function summary(ctx, tenant, state, events) {
  const span = events.find((event) => event.payload?.traceparent)?.payload.traceparent;
  const trace = String(span ?? "").split("-")[1];
  const cancelled = events.find((event) => event.type === "JobCancellationRequested");
  return [
    h(
      "div",
      { class: "grid" },
      panel(
        "About",
        facts({
          Name: state.name,
          Status: statusWords(state.status),
          Tenant: h("a", { href: `#/tenant/${named(tenant)}` }, tenant),
          Created:
            state.created_at || state.refused
              ? [time(state.created_at, state.created_hlc ?? ""), state.created_at && ` (${ago(state.created_at)})`]
              : "no creation that counts is known here",
          By: shownActor(state.actor),
          "Last event": [time(state.last_at, state.last_hlc), ", ", entryLink(ctx, tenant, state.last_seq)],
          "Run time": state.run_ms === null ? null : duration(state.run_ms),
          Cancelled: cancelled && [
            time(cancelled.at, cancelled.hlc),
            ` by ${shownActor(cancelled.actor)}`,
            headline(cancelled.type, cancelled.payload ?? {}),
          ],
          Trace: trace && [
            h("code", {}, trace),
            h("p", { class: "row" }, [
              h("a", { href: `#/jobs/${named(tenant)}?where=trace:${trace}` }, "Its jobs"),
              traceLink(ctx.session.traceUrl, span, "Its spans"),
            ]),
          ],
          "Data centres": state.assigned_dcs.join(", "),
          "Done, failed": state.completed || state.failed ? `${count(state.completed)}, ${count(state.failed)}` : null,
          "Fence token": count(state.fence_token),
          Error: state.error && (typeof state.error === "string" ? state.error : json(state.error)),
          "Does not count": state.uncounted_seq && [
            entryLink(ctx, tenant, state.uncounted_seq),
            ", of an excluded log",
          ],
          Refused: state.refused && `${state.refused.type}: ${state.refused.reason}`,
        }),
      ),
      panel("Spec", json(state.spec)),
    ),
    state.result && panel("Result", json(state.result)),
    ...state.conflicts.map((each) => panel("Conflict: created more than once", conflictTable(ctx, tenant, each))),
    state.other_creations.length > 0 && panel("What the other creations say", json(state.other_creations)),
  ];
}

function conflictTable(ctx, tenant, conflict) {
  const columns = [
    { name: "Entry", heads: true, of: (entry) => entryLink(ctx, tenant, entry.seq) },
    { name: "Log", of: (entry) => entry.log },
    { name: "Node", of: (entry) => entry.node_id },
    { name: "Created", of: (entry) => time(entry.at, entry.hlc) },
    { name: "Counts", of: (entry) => (entry.counts ? tag("counts", "ok") : tag("does not count", "warn")) },
  ];
  return table("The creation of lowest HLC counts, in every ledger that holds both", columns, conflict.entries);
}

function timeline(ctx, tenant, page) {
  return [
    h(
      "ol",
      { class: "timeline" },
      page.items.map((event, nth) => {
        const before = page.items[nth - 1];
        const { past, tone } = EVENTS[event.type] ?? { past: event.type ?? event.action };
        const [state, stateKind, why] = STATES[event.state];
        const { type, ...said } =
          event.payload && typeof event.payload === "object" ? event.payload : { type: null, payload: event.payload };
        const spans = traceLink(ctx.session.traceUrl, said.traceparent, "Trace");
        return h(
          "li",
          { class: tone },
          h(
            "div",
            { class: "line" },
            h("b", {}, past),
            time(event.at, event.hlc),
            h("span", { class: "soft" }, before ? later(before, event) : ago(event.at)),
            event.actor !== null && h("span", {}, "by ", h("b", {}, shownActor(event.actor))),
            h("span", { title: why }, tag(state, stateKind)),
            !event.counts && h("span", { title: "its log is excluded" }, tag("does not count", "warn")),
            entryLink(ctx, tenant, event.seq),
          ),
          headline(event.type, said),
          spans && h("p", {}, spans),
          h(
            "details",
            {},
            h("summary", {}, "All fields"),
            json(said),
            event.origin &&
              h(
                "p",
                { class: "soft" },
                `from ${event.origin.log}, seq ${event.origin.seq}, by ${event.origin.node_id}`,
              ),
            h(
              "p",
              { class: "soft" },
              "digest ",
              short(event.payload_digest, 20),
              ", link ",
              short(event.chain_link, 20),
            ),
          ),
        );
      }),
    ),
    page.next_cursor && h("p", { class: "soft" }, `The first ${EVENTS_PAGE} events; the API lists all.`),
  ];
}

/** How long after another an event was: by their trace_time where both carry one, else by their HLC. */
function later(before, event) {
  const [from, to] = [before, event].map(({ payload }) => payload?.trace_time);
  const isTraced = typeof from === "number" && typeof to === "number";
  const ms = isTraced ? (to - from) * 1000 : Date.parse(event.at) - Date.parse(before.at);
  if (Number.isNaN(ms)) return "";
  return `${duration(Math.abs(ms))} ${ms < 0 ? "earlier" : "later"}${isTraced ? ", by trace_time" : ""}`;
}

/** To where a trace is shown, as `console.trace_url` says. */
function traceLink(url, traceparent, text) {
  const trace = url && /^[0-9a-f]{2}-([0-9a-f]{32})-/.exec(traceparent)?.[1];
  return trace && h("a", { href: url.replaceAll("{trace_id}", trace), rel: "noopener noreferrer" }, text);
}

/** The few words of an event that somebody looks for: of its headline those parts whose fields are given, and no private
 * one. */
function headline(type, said) {
  const isShown = (name) => ["string", "number"].includes(typeof said[name]) && said[name] !== "";
  const parts = (EVENTS[type]?.headline ?? []).filter((part) => fieldsIn(part).every(isShown));
  const text = parts.map((part) => part.replace(FIELD, (_, name) => said[name])).join(", ");
  return text ? h("p", {}, text) : null;
}

function fieldsIn(part) {
  return [...part.matchAll(FIELD)].map(([, name]) => name);
}
