// Verdict objects as the interfaces have them, and what they come to: the outcomes and words of tally verify-bundle.

import { byOrder } from "./findings.js";

/** What ``compared_with`` calls the checkpoint that came with a bundle, and one that the reader kept elsewhere. */
export const OWN = "bundle";
export const KEPT = "file";

export const FINE = 0;
export const TAMPERED = 2;
export const INCOMPLETE = 3;
export const UNKNOWN_KEY = 4;

const GRAVER = ["ok", "not_checked", "unknown_key", "broken"];
const GRAVER_LAST = ["not_checked", "ok", "unknown_key", "broken"];

/** A break of the file itself, which stands at no seq. */
export function breakOf(kind, detail) {
  return { seq: 0, kind, detail, expected: null, actual: null };
}

/** The break that the first ``seq`` entries are not those of a checkpoint; roots are hex. */
export function rollbackAt(seq, detail, expected, actual) {
  return { seq, kind: "rollback", detail, expected, actual };
}

/** A verdict with one more break, of the aspect ``checkpoint``. */
export function withBreak(verdict, found) {
  const first = [verdict.first_break, found].filter((each) => each !== null).sort(byOrder)[0];
  const breaks = { ...verdict.breaks, [found.kind]: (verdict.breaks[found.kind] ?? 0) + 1 };
  const verdicts = { ...verdict.verdicts, checkpoint: "broken" };
  return { ...verdict, verdicts, valid: false, first_break: first, breaks };
}

/** A verdict with what comparing the kept checkpoint came to. What was broken before stays broken. */
export function withCheckpoint(verdict, outcome) {
  const { checkpoint } = verdict.verdicts;
  const graver = GRAVER_LAST.indexOf(outcome) > GRAVER_LAST.indexOf(checkpoint) ? outcome : checkpoint;
  const verdicts = { ...verdict.verdicts, checkpoint: graver };
  const comparedWith = [verdict.compared_with, outcome === "unknown_key" ? null : KEPT].filter(Boolean).join(", ");
  return { ...verdict, verdicts, valid: isValid(verdicts), compared_with: comparedWith || null };
}

/** The verdict on an aspect of two parts. */
export function graver(one, other) {
  return GRAVER.indexOf(one) > GRAVER.indexOf(other) ? one : other;
}

/** Nothing is broken and no key is unknown; what was not checked does not count. */
export function isValid(verdicts) {
  return !Object.values(verdicts).some((each) => each === "broken" || each === "unknown_key");
}

/** What the exit code of ``tally verify-bundle`` or ``tally verify-proof`` would be. */
export function exitCodeOf(verdict) {
  const results = Object.values(verdict.verdicts);
  if (results.includes("broken")) return TAMPERED;
  if (results.includes("unknown_key")) return UNKNOWN_KEY;
  const sources = [...(verdict.compared_with ?? "").split(", "), ...verdict.not_compared];
  const isComparedOutside = sources.some((each) => each !== "" && each !== OWN);
  const isUnchecked = Object.entries(verdict.verdicts).some(([aspect, result]) => {
    if (result !== "not_checked") return false;
    // No file holds job states, so there is nothing to compare with them.
    return aspect === "checkpoint" ? isComparedOutside : aspect !== "projection";
  });
  const isLater = verdict.from_seq > (verdict.verified_from_seq ?? 1);
  const isPart = "receipt" in verdict.verdicts ? false : verdict.unsigned_entries > 0 || isLater;
  const isBelowQuorum = verdict.policy !== undefined && !verdict.policy.met;
  return isUnchecked || isPart || isBelowQuorum ? INCOMPLETE : FINE;
}
