// The verdict as a page: the outcome first, then what was shown, the first break in its place, each verdict with what
// it means, who signed, and what was not shown.

import { code, counted, element, icon, plain, timeOfMs } from "./element.js";
import { sizeOf } from "./given.js";
import { eventList, rowsInPlace, timelineSection } from "./timeline.js";
import {
  BREAKS,
  ICONS,
  MEANINGS,
  OUTCOMES,
  RECEIPT_MEANINGS,
  RECEIPT_OUTCOMES,
  SOURCES,
  STATES,
  VERDICT_WORDS,
  notProved,
  proved,
} from "./words.js";

/** What a receipt is for, by what it covers. */
const SUBJECTS = { job: "Job", entry: "Entry of job", absent: "Job without entries" };

/** The whole report on what was judged; ``given`` is what the reader brought, by name. */
export function report(found, given, ask) {
  const { exitCode, verdict, jobs } = found;
  return element(
    "article",
    { class: `report ${STATES[exitCode]}` },
    outcome(exitCode, verdict, given),
    verdict.first_break && breakCard(verdict, ask),
    provedCard(exitCode, verdict),
    verdictTable(verdict),
    fileCard(verdict, given),
    signerCard(found),
    anchorCard(verdict),
    jobs && timelineSection(jobs, ask),
    limitsCard(verdict),
    actions(found, given),
  );
}

export function outcomeText(exitCode, verdict) {
  return ("receipt" in verdict.verdicts ? RECEIPT_OUTCOMES : OUTCOMES)[exitCode];
}

function outcome(exitCode, verdict, given) {
  const [head, rest] = outcomeText(exitCode, verdict).split(": ");
  const state = STATES[exitCode];
  return element(
    "header",
    { class: "outcome" },
    element("span", { class: "badge" }, icon(ICONS[state])),
    element(
      "div",
      {},
      element("h2", { id: "outcome" }, head),
      rest && element("p", { class: "rest" }, `${rest[0].toUpperCase()}${rest.slice(1)}.`),
      hint(verdict, exitCode),
      element(
        "p",
        { class: "quiet" },
        code(given.subject.name),
        `, exit code ${exitCode}, judged in ${verdict.duration_ms} ms`,
      ),
    ),
  );
}

/** What the reader can do about what is missing. */
function hint({ verdicts }, exitCode) {
  const signed = verdicts.bundle ?? verdicts.receipt;
  if (exitCode === 3 && signed === "not_checked") {
    return element(
      "p",
      { class: "rest" },
      "Bring the keys of the ledger, from its owner, and the signatures are checked too.",
    );
  }
  if (exitCode === 4) {
    return element(
      "p",
      { class: "rest" },
      "Ask the ledger's owner whether the key below is theirs; do not take it from the file.",
    );
  }
  return null;
}

function card(id, title, ...children) {
  return element("section", { class: "card", "aria-labelledby": id }, element("h2", { id }, title), ...children);
}

function breakCard(verdict, ask) {
  const { seq, kind, detail, expected, actual } = verdict.first_break;
  const counts = Object.values(verdict.breaks).reduce((sum, count) => sum + count, 0);
  const place = element("div", { class: "place" });
  // Where the file itself is broken, no row of it stands anywhere.
  if (seq > 0)
    ask("around", { seq }).then(
      ({ rows }) => place.replaceChildren(...inPlace(rows, seq)),
      () => {},
    );
  return card(
    "break-title",
    verdict.valid ? "What was found" : counts > 1 ? "The first break" : "The break",
    element("p", { class: "meaning" }, BREAKS[kind] ?? null),
    element(
      "dl",
      { class: "facts" },
      seq > 0 && fact("Place", `seq ${seq}`),
      fact("Kind", code(kind)),
      fact("Said", plain(detail)),
      expected !== null && fact("Expected", code(String(expected))),
      actual !== null && fact("Found", code(String(actual))),
    ),
    place,
    counts > 1 &&
      element(
        "p",
        { class: "quiet" },
        `${counted(counts, "break", "breaks")} in all: ${Object.entries(verdict.breaks)
          .map(([name, count]) => `${name} ${count}`)
          .join(", ")}.`,
      ),
  );
}

/** The rows around a break, and all of the one that it is about. */
function inPlace(rows, seq) {
  const broken = rows.filter((row) => row.seq === seq);
  const whole = broken.length ? [element("h3", {}, `Seq ${seq}, as it stands in the file`), eventList(broken)] : [];
  return [rowsInPlace(rows, seq), ...whole];
}

function fact(name, ...values) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, ...values.flat()));
}

function provedCard(exitCode, verdict) {
  const sentences = proved(exitCode, verdict);
  if (exitCode === 2) {
    return card(
      "proved-title",
      "What was proven",
      element("p", {}, "Nothing. A file that does not hold in one place says nothing in any other."),
    );
  }
  return card(
    "proved-title",
    exitCode === 0 ? "What was proven" : "What holds all the same",
    sentences.length
      ? element("ul", { class: "said" }, ...sentences.map((each) => element("li", {}, plain(each))))
      : element(
          "p",
          {},
          "The file agrees with itself. No key that you trust signed it: its author may have invented all of it.",
        ),
  );
}

function verdictTable(verdict) {
  const meanings = "receipt" in verdict.verdicts ? RECEIPT_MEANINGS : MEANINGS;
  return card(
    "verdicts-title",
    "Each verdict",
    element(
      "table",
      { class: "verdicts" },
      element(
        "thead",
        {},
        element("tr", {}, ...["checked", "verdict", "what it is"].map((name) => element("th", { scope: "col" }, name))),
      ),
      element(
        "tbody",
        {},
        ...Object.entries(verdict.verdicts).map(([aspect, result]) =>
          element(
            "tr",
            {},
            element("th", { scope: "row" }, aspect),
            element("td", {}, element("span", { class: `pill ${result}` }, VERDICT_WORDS[result])),
            element("td", {}, meanings[aspect]),
          ),
        ),
      ),
    ),
    element("h3", {}, "Not checked"),
    element("ul", { class: "said" }, ...verdict.not_checked.map((each) => element("li", {}, plain(each)))),
  );
}

function fileCard(verdict, given) {
  const about = verdict.bundle ?? verdict.receipt;
  const isRead = about.tenant_id !== undefined;
  return card(
    "file-title",
    "The file",
    element(
      "dl",
      { class: "facts" },
      fact("Name", code(given.subject.name)),
      fact("SHA-256", code(about.sha256, "hash")),
      fact("Size", sizeOf(about.bytes)),
      isRead && fact("Tenant", code(about.tenant_id)),
      isRead && fact("Log", code(`${about.log_origin}/${about.tenant_id}`)),
      isRead && fact("Made by", code(about.node_id)),
      isRead && verdict.bundle && bundleRange(about),
      isRead && verdict.receipt && fact(SUBJECTS[about.covers], code(about.job_id)),
      isRead &&
        verdict.receipt &&
        about.entries?.length > 0 &&
        fact("Entries", about.entries.map(({ seq }) => `seq ${seq}`).join(", ")),
    ),
  );
}

function bundleRange(about) {
  return [
    fact("Entries", `${about.entry_count.toLocaleString("en")}, seq ${about.from_seq} to ${about.to_seq}`),
    fact("First entry", timeOfMs(about.first_hlc.split(":")[0]), " (HLC ", code(about.first_hlc), ")"),
    fact("Last entry", timeOfMs(about.last_hlc.split(":")[0]), " (HLC ", code(about.last_hlc), ")"),
    fact(`Root at seq ${about.tree_size}`, code(about.tree_root, "hash")),
  ];
}

function signerCard({ verdict, keysUsed, needsBoth, keysInside }) {
  const about = verdict.bundle ?? verdict.receipt;
  const { checkpoint } = about;
  const byKey = Object.entries(about.snapshots_by_key ?? {}).map(
    ([id, count]) => `${id} (${count.toLocaleString("en")})`,
  );
  const saidToBe = verdict.verdicts.signatures === "ok" ? null : "said to be by ";
  const manifestKeys = about.manifest_key_ids ?? about.key_ids ?? [];
  return card(
    "signers-title",
    "Who signed, and against which keys",
    element(
      "dl",
      { class: "facts" },
      fact(
        verdict.bundle ? "Manifest" : "Receipt",
        manifestKeys.length ? codes(manifestKeys) : "by no key that you brought",
      ),
      verdict.bundle && fact("Statements over ranges", byKey.length ? [saidToBe, ...codes(byKey)] : "none seen"),
      checkpoint &&
        fact("Checkpoint", `size ${checkpoint.size.toLocaleString("en")}, root `, code(checkpoint.root, "hash")),
      checkpoint &&
        fact(
          "Checkpoint signed",
          about.checkpoint_key_ids.length ? codes(about.checkpoint_key_ids) : "by no key that you brought",
        ),
      checkpoint &&
        about.checkpoint_other_signatures.length > 0 &&
        fact(
          "Also signed",
          codes(about.checkpoint_other_signatures.map(({ name, hash }) => `${name}+${hash}`)),
          " (not judged here)",
        ),
      needsBoth && fact("You demanded", "both signatures of each statement over a range and of each checkpoint"),
      fact("Compared with", comparedWith(verdict)),
    ),
    keyTable(keysUsed),
    keysInside?.length > 0 && insideNote(keysInside, keysUsed),
  );
}

function comparedWith({ compared_with: sources }) {
  const named = (sources ?? "")
    .split(", ")
    .filter(Boolean)
    .map((source) => SOURCES[source] ?? plain(source));
  return named.join(", ") || "no checkpoint";
}

function codes(texts) {
  return texts.flatMap((text, at) => [at > 0 ? ", " : null, code(text)]);
}

function keyTable(keysUsed) {
  if (keysUsed === null) return element("p", { class: "hint" }, "You brought no key, so no signature was checked.");
  const columns = ["your key", "algorithm", "valid", "revoked from"];
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Keys that you brought" },
    element(
      "table",
      {},
      element(
        "caption",
        {},
        "Judged by these keys and no others. Compare their ids with what the ledger's owner tells you.",
      ),
      element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)))),
      element(
        "tbody",
        {},
        ...keysUsed.map((key) =>
          element(
            "tr",
            {},
            element("th", { scope: "row" }, code(key.key_id)),
            element("td", {}, key.algorithm),
            element(
              "td",
              {},
              `from ${plain(key.not_before ?? "the beginning")} to ${plain(key.not_after ?? "no end")}`,
            ),
            element("td", {}, key.revoked_from_hlc === null ? "never" : code(key.revoked_from_hlc)),
          ),
        ),
      ),
    ),
  );
}

function insideNote(keysInside, keysUsed) {
  const yours = new Set((keysUsed ?? []).map((key) => key.key_id));
  const others = keysInside.filter((id) => !yours.has(id));
  return element(
    "p",
    { class: "quiet" },
    `The file names ${counted(keysInside.length, "key", "keys")} of its own, which proves nothing and was not used`,
    others.length ? element("span", {}, ". Not among yours: ", codes(others), ".") : "; you brought all of them.",
  );
}

function anchorCard({ anchors, policy }) {
  if (!anchors.length && !policy) return null;
  const title = "Statements of external witnesses";
  return card("anchors-title", title, policy && quorumLine(policy), anchors.length > 0 && anchorTable(anchors));
}

function anchorTable(anchors) {
  const columns = ["who", "what", "time said", "entries", "verdict"];
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of statements" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)))),
      element(
        "tbody",
        {},
        ...anchors.map(({ kind, by, time, to_seq: toSeq, status, detail }) =>
          element(
            "tr",
            {},
            element("th", { scope: "row" }, code(by)),
            element("td", {}, kind === "witness" ? "cosignature" : "time stamp (RFC 3161)"),
            element("td", {}, plain(time)),
            element("td", {}, `1 to ${toSeq}`),
            element(
              "td",
              {},
              element("span", { class: `pill ${status}` }, VERDICT_WORDS[status]),
              detail && element("span", { class: "why" }, plain(detail)),
            ),
          ),
        ),
      ),
    ),
  );
}

/** How far the quorum of the policy covers what is judged, and who is missing. */
function quorumLine({ met, quorum, quorum_to_seq: toSeq, missing }) {
  const reach = `Quorum ${plain(quorum)} covers entries up to seq ${toSeq}`;
  return element("p", {}, met ? `${reach}.` : `Below quorum. ${reach}; ${missing.map((each) => plain(each)).join(", ")}.`);
}

function limitsCard(verdict) {
  return card(
    "limits-title",
    "What this does not prove",
    element("ul", { class: "said" }, ...notProved(verdict).map((each) => element("li", {}, each))),
  );
}

function actions(found, given) {
  const told = () =>
    JSON.stringify(
      { file: given.subject.name, exit_code: found.exitCode, ...found.verdict, verified_at: given.verifiedAt },
      (_, value) => (typeof value === "bigint" ? String(value) : value),
      2,
    );
  return element(
    "p",
    { class: "actions" },
    element("button", { type: "button", class: "button", onclick: () => globalThis.print() }, "Print"),
    element(
      "button",
      { type: "button", class: "button", onclick: () => saveFile("verdict.json", "application/json", told()) },
      "Save the verdict as JSON",
    ),
    element("span", { class: "quiet" }, `Verified ${given.verifiedAt} by the clock of this computer.`),
  );
}

/** Gives the reader a file to keep. */
export function saveFile(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
