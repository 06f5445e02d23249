// Retention of a tenant: what stays, what stops the prefix, what would leave, what has left.

import { WHYS } from "./advice.js";
import { get, getIfAllowed } from "./api.js";
import { count, facts, fill, h, panel, plural, short, table, tag, waiting } from "./dom.js";
import { named, pickTenant } from "./pick_tenant.js";
import { ago, time } from "./times.js";

const JOBS_NAMED = 5;

export async function retention(ctx) {
  const [name] = ctx.rest;
  const place = h("div", {}, waiting("Reading the policy"));
  ctx.show(
    `Retention of ${name}`,
    h("h1", {}, "Retention"),
    h(
      "p",
      { class: "soft" },
      "How long entries stay in the database. Older ones leave for the archive, on the record; nothing leaves by itself.",
    ),
    h("p", { class: "row actions" }, await pickTenant(ctx, name, (tenant) => `#/retention/${named(tenant)}`)),
    place,
  );
  const asked = { tenant_id: name };
  const [policy, holds, head, archive] = await Promise.all([
    get("/v1/retention", asked, ctx.signal),
    get("/v1/holds", asked, ctx.signal),
    get("/v1/chain/head", asked, ctx.signal),
    getIfAllowed("/v1/archive", {}, ctx.signal),
  ]);
  fill(
    place,
    h(
      "div",
      { class: "grid" },
      panel("What stays", stays(policy, head)),
      panel("What stops the rest", stops(name, policy.stopped_by)),
      panel("What would leave", wouldLeave(name, policy)),
      archive && panel("Archive", archived(name, archive)),
    ),
    panel(null, holds.items.length ? openHolds(name, holds.items) : [h("h2", {}, "Holds"), h("p", {}, "None is open.")]),
    panel(null, policy.prunes.length ? left(name, policy) : [h("h2", {}, "What has left"), h("p", {}, "Nothing.")]),
  );
}

const entry = (name, seq) => h("a", { href: `#/verify/${named(name)}?at=${seq}` }, count(seq));

function stays(policy, head) {
  const first = policy.verified_from_seq;
  return facts({
    Period: policy.period ?? "for ever: no period is set",
    Minimum: policy.minimum ?? "none",
    Holds: policy.open_holds ? `${count(policy.open_holds)} open` : "none",
    Entries: first <= head.seq ? `${count(first)} to ${count(head.seq)} are here` : "none is here",
    Left: policy.pruned_to_seq ? `1 to ${count(policy.pruned_to_seq)}` : "nothing",
  });
}

function stops(name, stop) {
  if (!stop) return h("p", {}, "Nothing: each entry may leave.");
  const { because, remedy } = WHYS[stop.why] ?? { because: stop.detail };
  return [
    facts({ Entry: stop.seq > 0 ? entry(name, stop.seq) : null, Why: tag(stop.why, "warn"), Detail: stop.detail }),
    h("p", {}, because, " All entries after it stay with it."),
    remedy && h("p", { class: "do" }, h("b", {}, "What to do: "), remedy),
  ];
}

function wouldLeave(name, { pruned_to_seq: pruned, prunable_to_seq: prunable }) {
  if (prunable <= pruned) return h("p", {}, "Nothing now.");
  return [
    h("p", {}, `Entries ${count(pruned + 1)} to ${count(prunable)}: ${plural(prunable - pruned, "entry", "entries")}.`),
    h("p", { class: "do" }, "They leave by ", h("code", {}, `tally prune --tenant ${name}`), "."),
  ];
}

function archived(name, archive) {
  if (archive.url === null) {
    return h("p", {}, "None, so nothing can leave. ", h("code", {}, "archive.url"), " names one (docs/archive.md).");
  }
  const found = archive.tenants.find((each) => each.tenant_id === name);
  const error = found?.error ?? archive.error;
  return facts({
    Place: h("code", {}, archive.url),
    Has: found && `entries up to ${count(found.archived_to_seq)} of ${count(found.signed_to_seq)} signed`,
    Lag: found && lagOf(found),
    Fault: error && tag(error, "bad"),
  });
}

function lagOf({ lag_entries: entries, lag_seconds: seconds }) {
  if (!entries) return tag("✓ none", "ok");
  return tag(`${plural(entries, "entry", "entries")}, for ${count(Math.round(seconds))} s`, "warn");
}

function openHolds(name, items) {
  return table(
    "Open holds: what they hold stays whatever its age",
    [
      { name: "Hold", heads: true, of: (hold) => h("code", {}, hold.hold_id) },
      { name: "Reason", of: (hold) => hold.reason },
      { name: "Holds", of: (hold) => heldBy(name, hold) },
      { name: "By", of: (hold) => hold.actor ?? hold.placed_by_log ?? "–" },
      { name: "Since", of: (hold) => [time(hold.at, hold.hlc), hold.at && ` (${ago(hold.at)})`] },
      { name: "Entry", number: true, minor: true, of: (hold) => entry(name, hold.seq) },
    ],
    items,
  );
}

function heldBy(name, { job_ids: jobs, where }) {
  if (jobs === null) return "every entry of the tenant";
  const more = jobs.length - JOBS_NAMED;
  return [
    `${plural(jobs.length, "job")}: `,
    jobs
      .slice(0, JOBS_NAMED)
      .map((job, at) => [at > 0 && ", ", h("a", { href: `#/job/${named(name)}/${named(job)}` }, job)]),
    more > 0 && ` and ${count(more)} more`,
    where && [", found by ", h("code", {}, where)],
  ];
}

function left(name, { prunes }) {
  return table(
    "What has left, newest first: the PRUNED entries that are here",
    [
      { name: "Entries", heads: true, of: (prune) => `${count(prune.from_seq)} to ${count(prune.to_seq)}` },
      { name: "Count", number: true, of: (prune) => count(prune.entries) },
      { name: "Left", of: (prune) => [time(prune.at, prune.hlc), prune.at && ` (${ago(prune.at)})`] },
      { name: "By", of: (prune) => prune.actor ?? "–" },
      { name: "Jobs that had not ended", number: true, minor: true, of: (prune) => count(prune.never_ended) },
      { name: "Archive", of: (prune) => h("code", {}, prune.archive) },
      { name: "Manifest", minor: true, of: (prune) => short(prune.manifest) },
      { name: "Entry", number: true, of: (prune) => entry(name, prune.seq) },
    ],
    prunes,
  );
}
