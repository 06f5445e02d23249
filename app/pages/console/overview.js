// The ledger: what is wrong and what to do about it, before anything else; then how the node does.

import { getIfAllowed, metrics, readiness, Unreachable } from "./api.js";
import { count, facts, fill, h, panel, plural, refill, svg, tag, waiting } from "./dom.js";
import { CHECKS } from "./facts.js";
import { named } from "./pick_tenant.js";
import { time } from "./times.js";

export const ASK_EVERY_MS = 5000;
const ANSWER_MAX_MS = 30_000;
const SAMPLES_MAX = 60;
const ICON = "console/icon.svg";
const ICON_FAULT = "console/icon-fault.svg";

export async function overview(ctx) {
  const places = {
    banner: h("div", {}, waiting("Asking the service how it does")),
    faults: h("div"),
    flow: h("div"),
    about: h("div", { class: "grid" }),
    checks: h("div"),
  };
  const seen = { told: null, samples: [], before: null };
  ctx.show("Ledger", Object.values(places));
  await keepUp(ctx, () => update(ctx, places, seen));
}

/** Draw, and again until the page is left; not while it asks something, so that its reader comes back to where he was. */
export async function keepUp(ctx, draw) {
  ctx.signal.addEventListener("abort", () => icon(ICON));
  await draw();
  const again = async () => {
    for (;;) {
      await pause(ctx.signal);
      if (ctx.signal.aborted) return;
      if (!document.hidden && !document.querySelector("dialog")) await draw();
    }
  };
  again().catch((error) => ctx.fail(error));
}

async function update(ctx, places, seen) {
  const { session } = ctx;
  const signal = AbortSignal.any([ctx.signal, AbortSignal.timeout(ANSWER_MAX_MS)]);
  const asked = Promise.allSettled([
    getIfAllowed("/v1/node", {}, signal),
    session.may("operate") ? metrics(signal) : null,
    session.may("audit") ? getIfAllowed("/v1/exchange", {}, signal) : null,
    session.may("audit") ? getIfAllowed("/v1/archive", {}, signal) : null,
  ]);
  let state;
  try {
    state = await readiness(signal);
  } catch (error) {
    if (!ctx.signal.aborted) drawUnknown(ctx, places, seen, error);
    return;
  }
  drawState(ctx, places, seen, state);
  refill(places.checks, allChecks(state.checks));
  const [node, measured, exchange, archive] = (await asked).map((each) => each.value ?? null);
  if (ctx.signal.aborted) return;
  if (node) drawNode(places, seen, node, measured, { exchange, archive }, state.checks);
  else for (const place of [places.flow, places.about]) fill(place);
}

/** Nobody knows how the service does: what was true is not shown as if it still were. */
function drawUnknown(ctx, places, seen, error) {
  const isAway = error instanceof Unreachable;
  const said = isAway ? "The service does not answer" : error.title;
  const more = isAway ? "See whether it runs, and whether you reach it." : error.message;
  refill(places.banner, banner("bad", said, `${more} This page asks again every 5 seconds.`));
  for (const place of [places.faults, places.flow, places.about, places.checks]) fill(place);
  tell(ctx, seen, "Ledger", said, true);
}

/** What the checks of a node come to: `said`, the checks that fail, those of them that are urgent, and its kind. */
export function judged(state) {
  const faults = Object.entries(state.checks).filter(([, check]) => !check.ok);
  const urgent = faults.filter(([name]) => isUrgent(name));
  const more = faults.length
    ? faults.map(([name]) => CHECKS[name]?.title ?? name).join(", ")
    : `${Object.keys(state.checks).length} checks pass. Events are taken, chained and signed.`;
  const kind = !faults.length ? "ok" : urgent.length ? "bad" : "warn";
  return { faults, urgent, kind, more, said: headline(state, faults, urgent) };
}

function drawState(ctx, places, seen, state) {
  const { faults, urgent, kind, more, said } = judged(state);
  refill(places.banner, banner(kind, said, more, lastVerified(state.verified)));
  const ordered = [...urgent, ...faults.filter((each) => !urgent.includes(each))];
  refill(
    places.faults,
    ordered.map(([name, check]) => fault(name, check.detail)),
  );
  tell(ctx, seen, "Ledger", faults.length ? `${said}: ${more}` : said, faults.length > 0);
}

const stops = (name) => CHECKS[name]?.stops ?? "NOTHING";

/** Whether the check stops something, or says that what is on record was changed. */
const isUrgent = (name) => stops(name) !== "NOTHING" || CHECKS[name]?.isGrave;

export function headline(state, faults, urgent) {
  if (!faults.length) return "Everything holds";
  if (faults.some(([name]) => stops(name) === "WRITES")) return "The node takes no writes";
  if (faults.some(([name]) => stops(name) === "BEYOND_LOCAL")) {
    return "The node is not ready: it takes events at LOCAL alone";
  }
  if (!state.ready) return "The node is not ready; events are taken";
  if (faults.some(([name]) => name === "breaks")) return "What is on record was changed; requests are taken";
  return urgent.length
    ? "What is on record may have been changed; requests are taken"
    : `${plural(faults.length, "thing")} to look at; requests are taken`;
}

/** Say what changed, to who does not see the page either. */
export function tell(ctx, seen, page, said, isFault) {
  if (seen.told !== said) ctx.say(said);
  seen.told = said;
  document.title = `${isFault ? "✕ " : ""}${isFault ? said.split(":")[0] : page} · Tallystick`;
  icon(isFault ? ICON_FAULT : ICON);
}

function icon(address) {
  const link = document.getElementById("icon");
  if (link.getAttribute("href") !== address) link.setAttribute("href", address);
}

/** When all chains had been verified from end to end, and by whom. */
export function lastVerified(verified) {
  if (!verified) return null;
  const never = verified.never_verified;
  if (!verified.at) return h("p", { class: "verified" }, "No chain was verified from end to end yet.");
  const by = { walk: " by this node in the background", node: " by this node", caller: " by a caller" }[verified.by];
  return h(
    "p",
    { class: "verified" },
    "All chains were last verified from end to end ",
    time(verified.at),
    by ?? (verified.by ? ` by ${verified.by}` : ""),
    never ? `, but for ${plural(never, "chain")} that never were.` : ".",
  );
}

export function banner(kind, title, text, more = null, heading = "h1") {
  return h(
    "div",
    { class: `banner ${kind}` },
    h("span", { class: "mark", "aria-hidden": "true" }, kind === "ok" ? "✓" : kind === "bad" ? "✕" : "!"),
    h("div", {}, h(heading, { tabindex: "-1" }, title), h("p", {}, text), more),
  );
}

function fault(name, detail) {
  const { title, remedy } = CHECKS[name] ?? { title: name, remedy: "Look at the log of the service." };
  return h(
    "section",
    { class: `panel fault ${isUrgent(name) ? "" : "warn"}`, "data-check": name },
    h("h2", {}, title, " ", h("code", { class: "soft" }, name)),
    h("p", {}, detail),
    name === "breaks" &&
      h(
        "p",
        { class: "actions" },
        brokenTenants(detail).map((tenant) => [
          h("a", { class: "button main", href: `#/verify/${named(tenant)}?run=1` }, `Show it in ${tenant}`),
          " ",
        ]),
      ),
    h(
      "div",
      { class: "do" },
      h("b", {}, "What to do: "),
      remedy,
      " More: ",
      h("code", {}, `docs/runbook.md#${name}`),
      ".",
    ),
  );
}

/** The tenants that the check of breaks names: "… at seq 21 of acme …". */
function brokenTenants(detail) {
  return [...new Set([...detail.matchAll(/at seq \d+ of ([a-z0-9_-]+)/g)].map((match) => match[1]))];
}

function drawNode(places, seen, node, measured, { exchange, archive }, checks) {
  const at = node.positions;
  const steps = [
    ["Written", at.written_lsn, 0],
    ["Durable", at.durable_lsn, at.written_lsn - at.durable_lsn],
    ["Committed", at.commit_lsn, at.durable_lsn - at.commit_lsn],
    ["Chained", at.chained_lsn, at.commit_lsn - at.chained_lsn],
  ];
  sample(seen, at.chained_lsn);
  fill(
    places.flow,
    panel(
      "Positions in the log",
      h(
        "ol",
        { class: "steps" },
        steps.map(([name, lsn, behind]) =>
          h(
            "li",
            { class: behind > 0 && "behind" },
            h("b", {}, count(lsn)),
            h("span", {}, name, behind > 0 ? `, ${count(behind)} behind` : ""),
          ),
        ),
      ),
      h("p", { class: "soft" }, "Each is the LSN of the newest event that has come so far."),
      spark(seen.samples),
    ),
  );
  refill(
    places.about,
    panel(
      "Node",
      facts({
        Node: h("code", {}, node.node_id),
        Region: node.region,
        Epoch: count(node.epoch),
        Acknowledges: h("code", {}, node.ack_mode),
        "Waiting to be chained": measured && count(measured.get("wal_backlog_entries") ?? 0),
        "Newest event": [
          time(node.clock.last_at, node.clock.last_hlc),
          node.clock.offset_ms ? `, ${node.clock.offset_ms} ms ahead of the clock of this machine` : "",
        ],
        Failure: node.failure,
      }),
    ),
    panel(
      "What it works with",
      facts({
        PostgreSQL: stateOf(checks.database),
        Signing: stateOf(checks.signing),
        Safekeepers: h("a", { href: "#/replicas" }, membersOf(node)),
        Exchange: exchange && h("a", { href: "#/replicas" }, peersOf(exchange)),
        Archive: archive && archiveOf(archive),
        Witnesses: measured?.has("log_witness_waiting") && witnessesOf(measured, checks.witnesses),
        Breaks: stateOf(checks.breaks),
      }),
    ),
  );
}

const stateOf = (check) => (check ? (check.ok ? tag("✓ in order", "ok") : tag("✕ see above", "bad")) : null);

function membersOf(node) {
  const members = node.members ?? [];
  return members.length
    ? `${members.filter((each) => each.in_sync).length} of ${members.length} in sync`
    : "none: this node alone holds what is not chained yet";
}

function archiveOf(archive) {
  if (archive.url === null) return "none";
  const failing = archive.tenants.filter((each) => each.error !== null).length;
  const behind = archive.lag_entries
    ? `${plural(archive.lag_entries, "entry", "entries")} behind, for ${Math.round(archive.lag_seconds)} s`
    : "has all that is signed";
  return [archive.error ?? behind, failing > 0 ? `, ${plural(failing, "tenant")} not archived further` : ""];
}

function witnessesOf(measured, check) {
  const waiting = measured.get("log_witness_waiting");
  if (!check && !waiting) return null;
  return [stateOf(check), waiting > 0 && `${check ? ", " : ""}${plural(waiting, "checkpoint")} to be cosigned`];
}

function peersOf({ peers }) {
  const behind = peers.reduce((sum, peer) => sum + peer.lag_entries, 0);
  return peers.length
    ? `${plural(peers.length, "other ledger")}, ${plural(behind, "entry", "entries")} behind`
    : "with no other ledger";
}

function sample(seen, chained) {
  const now = performance.now();
  if (seen.before) seen.samples.push(Math.max(0, (chained - seen.before.chained) / ((now - seen.before.now) / 1000)));
  if (seen.samples.length > SAMPLES_MAX) seen.samples.shift();
  seen.before = { chained, now };
}

function spark(samples) {
  if (samples.length < 2) return h("p", { class: "soft" }, "Events a second: measured from now on.");
  const most = Math.max(...samples);
  const text = `${count(Math.round(samples.at(-1)))} events a second now, ${count(Math.round(most))} at most in the last ${count((samples.length * ASK_EVERY_MS) / 1000)} seconds`;
  const began = SAMPLES_MAX - samples.length;
  const points = samples
    .map((value, at) => `${((began + at) / (SAMPLES_MAX - 1)) * 300},${38 - (value / most) * 36}`)
    .join(" ");
  return [
    most >= 1 &&
      svg(
        "svg",
        { class: "spark", viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img", "aria-label": text },
        svg("polyline", {
          points,
          fill: "none",
          stroke: "currentColor",
          "stroke-width": "1.5",
          "vector-effect": "non-scaling-stroke",
        }),
      ),
    h("p", { class: "soft" }, text),
  ];
}

function allChecks(checks) {
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, `All ${Object.keys(checks).length} checks`),
    h(
      "ul",
      { class: "tags" },
      Object.entries(checks).map(([name, check]) =>
        h("li", {}, tag(`${check.ok ? "✓" : "✕"} ${CHECKS[name]?.title ?? name}`, check.ok ? "ok" : "bad")),
      ),
    ),
  );
}

function pause(signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ASK_EVERY_MS);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
