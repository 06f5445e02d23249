// Verifying a chain in ranges, and its breaks in the place where they are.

import { BREAKS, VERDICTS } from "./advice.js";
import { ask, get } from "./api.js";
import { count, facts, field, fill, h, json, panel, plural, short, table, tag } from "./dom.js";
import { named, pickTenant } from "./pick_tenant.js";
import { time } from "./times.js";

const RANGE_ENTRIES = 20_000;
const AROUND = 2;
const WORDS = {
  ok: ["✓ ok", "ok"],
  broken: ["✕ broken", "bad"],
  unknown_key: ["✕ unknown key", "bad"],
  not_checked: ["not checked", ""],
};
const WORST = ["broken", "unknown_key", "not_checked", "ok"];

export async function verify(ctx) {
  const [name] = ctx.rest;
  const at = Number(ctx.query.get("at")) || null;
  const result = h("div");
  const from = h("input", {
    type: "number",
    name: "from",
    min: "1",
    value: ctx.query.get("from") ?? "",
    placeholder: "first",
  });
  const to = h("input", {
    type: "number",
    name: "to",
    min: "1",
    value: ctx.query.get("to") ?? "",
    placeholder: "last",
  });
  const button = h("button", { class: "main" }, "Verify");
  ctx.show(
    `Verify ${name}`,
    h("h1", {}, "Verify"),
    h(
      "form",
      {
        class: "panel row",
        onsubmit: (event) => {
          event.preventDefault();
          run(ctx, name, from, to, button, result);
        },
      },
      await pickTenant(ctx, name, (tenant) => `#/verify/${named(tenant)}`),
      field("From entry", from),
      field("To entry", to),
      button,
    ),
    h(
      "p",
      { class: "soft" },
      "The service recomputes every digest, link, tree and signature from the rows. What it compares with is its own: whoever does not trust it verifies a ",
      h("a", { href: `#/bundles/${named(name)}` }, "bundle"),
      " offline, or with ",
      h("code", {}, "tally verify"),
      ".",
    ),
    result,
  );
  if (at) fill(result, await entriesAround(ctx, name, at, null));
  else if (ctx.query.has("run")) await run(ctx, name, from, to, button, result);
}

async function run(ctx, name, from, to, button, result) {
  button.disabled = true;
  try {
    const first = Number(from.value) || 1;
    const head = await get("/v1/chain/head", { tenant_id: name }, ctx.signal);
    const last = Math.min(Number(to.value) || head.seq, head.seq);
    if (first > last)
      return void fill(
        result,
        h("p", { role: "alert" }, `There is no entry to verify there: the chain has entries 1 to ${count(head.seq)}.`),
      );
    const isWhole = first === 1 && last === head.seq;
    const verdict = await inRanges(ctx, name, first, last, isWhole, result);
    ctx.say(saidOf(verdict, isWhole));
    const broken = verdict.first_break;
    fill(
      result,
      conclusion(name, verdict, isWhole),
      broken && (await entriesAround(ctx, name, broken.seq, broken)),
      details(verdict),
    );
    const what = isWhole ? name : `${name} ${first}–${last}`;
    document.title = `${holds(verdict) ? "✓" : "✕"} ${what} · Tallystick`;
  } catch (error) {
    if (error.name !== "AbortError") ctx.fail(error, result);
  } finally {
    button.disabled = false;
  }
}

/** Verify piece by piece, showing how far; then, where that is everything, what only the whole can show. */
async function inRanges(ctx, name, first, last, isWhole, result) {
  const bar = h("progress", { max: String(last - first + 1), value: "0", "aria-label": "Entries verified" });
  const told = h("p", { "aria-live": "off" });
  fill(result, panel("Verifying", bar, told));
  const parts = [];
  if (last - first >= RANGE_ENTRIES || !isWhole) {
    for (let start = first; start <= last; start += RANGE_ENTRIES) {
      const end = Math.min(last, start + RANGE_ENTRIES - 1);
      fill(told, `Entries ${count(start)} to ${count(end)} of ${count(last)}`);
      parts.push(await get("/v1/chain/verify", { tenant_id: name, from_seq: start, to_seq: end }, ctx.signal));
      bar.value = end - first + 1;
      if (parts.at(-1).first_break)
        fill(told, `Broken at entry ${count(parts.at(-1).first_break.seq)}; verifying the rest`);
    }
  }
  if (!isWhole) return folded(parts);
  fill(told, "The whole: end, tree, table of jobs, and the checkpoints that were kept");
  bar.removeAttribute("value");
  return get("/v1/chain/verify", { tenant_id: name }, ctx.signal);
}

/** What the verdicts of ranges come to together: of each check the worst. */
function folded(parts) {
  const worse = (one, other) => (WORST.indexOf(one) < WORST.indexOf(other) ? one : other);
  return parts.reduce((sum, part) => ({
    ...part,
    from_seq: sum.from_seq,
    valid: sum.valid && part.valid,
    entries_checked: sum.entries_checked + part.entries_checked,
    first_break: sum.first_break ?? part.first_break,
    duration_ms: sum.duration_ms + part.duration_ms,
    unsigned_entries: sum.unsigned_entries + part.unsigned_entries,
    breaks: Object.entries(part.breaks).reduce(
      (all, [kind, number]) => ({ ...all, [kind]: number + (all[kind] ?? 0) }),
      sum.breaks,
    ),
    verdicts: Object.fromEntries(
      Object.entries(part.verdicts).map(([check, verdict]) => [check, worse(verdict, sum.verdicts[check])]),
    ),
  }));
}

/** Whether the chain holds, and all beside it of which the node knows. */
function holds(verdict) {
  return verdict.valid && !verdict.not_mended?.length;
}

function saidOf(verdict, isWhole) {
  if (verdict.valid && !holds(verdict)) return "The chain holds, and a table beside it does not";
  if (verdict.valid) return isWhole ? "The chain holds" : "What was verified holds";
  const first = verdict.first_break;
  return first ? `The chain is broken at entry ${count(first.seq)}` : "The chain does not hold";
}

function conclusion(name, verdict, isWhole) {
  const kind = holds(verdict) ? (isWhole ? "ok" : "warn") : "bad";
  const first = verdict.first_break ?? verdict.not_mended?.[0];
  const more = `${plural(verdict.entries_checked, "entry", "entries")} of ${name}, ${count(verdict.from_seq)} to ${count(verdict.to_seq)}, in ${(verdict.duration_ms / 1000).toFixed(2)} s.`;
  return h(
    "div",
    { class: `banner ${kind}`, role: "status" },
    h("span", { class: "mark", "aria-hidden": "true" }, holds(verdict) ? "✓" : "✕"),
    h("div", {}, h("h2", {}, saidOf(verdict, isWhole)), h("p", {}, first ? `${BREAKS[first.kind] ?? first.kind} ${more}` : more)),
  );
}

function details(verdict) {
  const anchors = verdict.anchors.map((each) =>
    h("div", {}, `${each.by}: to entry ${count(each.to_seq)}, ${each.status}`),
  );
  const found = Object.entries(verdict.breaks)
    .map(([kind, number]) => `${kind} ${count(number)}`)
    .join(", ");
  return h(
    "div",
    { class: "grid" },
    panel(
      null,
      table(
        "What was checked",
        [
          { name: "Check", heads: true, of: ([check]) => check },
          { name: "Verdict", of: ([, said]) => tag(...WORDS[said]) },
          { name: "About", of: ([check]) => VERDICTS[check] ?? "" },
        ],
        Object.entries(verdict.verdicts),
      ),
    ),
    panel(
      "Up to where",
      facts({
        End: [`entry ${count(verdict.head.seq)}, link `, short(verdict.head.chain_link, 20)],
        "Signed to": `entry ${count(verdict.signed_to_seq)}; ${plural(verdict.unsigned_entries, "entry", "entries")} of these unsigned`,
        "Compared with": verdict.compared_with
          ? `the checkpoint kept by: ${verdict.compared_with}`
          : "no checkpoint kept elsewhere",
        "From outside": anchors.length ? anchors : "no witness, no time stamp",
        Breaks: found || "none",
      }),
    ),
  );
}

/** The entries around a place, as they are stored; of a break with what was expected. */
async function entriesAround(ctx, name, seq, broken) {
  const start = Math.max(1, seq - AROUND);
  const page = await get("/v1/chain/entries", { tenant_id: name, from_seq: start, limit: 2 * AROUND + 1 }, ctx.signal);
  const digests = new Map(
    await Promise.all(page.items.map(async (entry) => [entry.seq, await digestOf(entry.payload)])),
  );
  const isThere = page.items.some((entry) => entry.seq === seq);
  const shown = page.items.find((entry) => entry.seq === seq);
  return [
    h(
      "section",
      { class: `panel ${broken ? "fault" : ""}`, id: "break" },
      broken && [
        h("h2", {}, `Entry ${count(seq)}: ${broken.kind}`),
        h("p", {}, broken.detail),
        facts({
          Expected: value(broken.expected),
          Found: value(broken.actual),
          Job: shown && h("a", { href: `#/job/${named(name)}/${named(shown.job_id)}` }, shown.job_id),
        }),
        h(
          "p",
          { class: "do" },
          h("b", {}, "What to do: "),
          "Keep the database as it is. Compare with a bundle or a backup from before; ",
          h("code", {}, "tally restore"),
          " puts rows back (docs/backup.md). It stays red on the overview until it is mended, verified as a whole and acknowledged.",
        ),
        ctx.session.may("operate", name) && acknowledgement(ctx, name, broken),
      ],
      table(
        broken ? "The entries before and after it, as they are stored now" : `Entries around ${count(seq)}, as they are stored`,
        [
          { name: "Entry", heads: true, of: (entry) => count(entry.seq) },
          { name: "At", of: (entry) => time(entry.at, entry.t_hlc) },
          { name: "Job", of: (entry) => h("a", { href: `#/job/${named(name)}/${named(entry.job_id)}` }, entry.job_id) },
          { name: "Action", of: (entry) => entry.action },
          {
            name: "Content",
            of: (entry) =>
              h(
                "details",
                { open: Boolean(broken) && entry.seq === seq },
                h("summary", {}, `${count(new TextEncoder().encode(entry.payload).length)} bytes`),
                h("pre", { tabindex: "0" }, entry.payload),
              ),
          },
          { name: "Digest", of: (entry) => digestCell(entry, digests.get(entry.seq)) },
          {
            name: "Link",
            of: (entry) => [
              short(entry.chain_link, 10),
              h("div", { class: "soft" }, "after ", short(entry.prev_chain_link, 10)),
            ],
          },
        ],
        page.items,
        { kind: (entry) => broken && entry.seq === seq && "broken" },
      ),
      broken && !isThere && h("p", {}, `There is no entry ${count(seq)} now.`),
    ),
  ];
}

/** A form that says that somebody has seen the break; that is on record for ever. */
function acknowledgement(ctx, name, broken) {
  const reason = h("input", { name: "reason", required: true, maxlength: "1000", autocomplete: "off" });
  const told = h("p", { role: "status" });
  const run = async (event) => {
    event.preventDefault();
    try {
      await ask("POST", "/v1/chain/acknowledge", {
        json: { tenant_id: name, kind: broken.kind, seq: broken.seq, reason: reason.value },
      });
      fill(told, "Acknowledged, and recorded in _system. The alarm ends once the rows are mended and a whole verification is valid.");
    } catch (error) {
      fill(told, error.message);
    }
  };
  return h(
    "details",
    { class: "actions" },
    h("summary", {}, "Acknowledge that it was seen"),
    h("form", { class: "row", onsubmit: run }, field("Reason", reason), h("button", {}, "Acknowledge")),
    told,
  );
}

const value = (given) =>
  given === null || given === undefined
    ? "nothing"
    : typeof given === "object"
      ? json(given)
      : h("code", {}, String(given));

/** SHA-256 of what is stored, computed by this browser; null where it may not. */
async function digestOf(text) {
  if (!crypto.subtle) return null;
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return [...bytes].map((each) => each.toString(16).padStart(2, "0")).join("");
}

function digestCell(entry, computed) {
  const stored = short(entry.payload_digest, 10);
  if (computed === null) return stored;
  return computed === entry.payload_digest
    ? [stored, h("div", { class: "soft" }, "✓ recomputed here")]
    : [stored, h("div", {}, tag("✕ not this content's", "bad"), " it has ", short(computed, 10))];
}
