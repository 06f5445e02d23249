// Times in the zone of who reads, with UTC in the title.

import { h } from "./dom.js";

const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const OF_TODAY = new Intl.DateTimeFormat(undefined, CLOCK);
const OF_THIS_YEAR = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", ...CLOCK });
const DATED = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const OF_ANY_YEAR = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const AGO = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });
const UNITS = [
  ["day", 86400],
  ["hour", 3600],
  ["minute", 60],
  ["second", 1],
];

/** The reader's zone, as it is called. */
export const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

/** A time of RFC 3339; `more` goes into its title. */
export function time(text, more = "") {
  if (!text) return h("span", { class: "soft" }, "–");
  const at = new Date(text);
  const now = new Date();
  const today = at.toDateString() === now.toDateString();
  return formatted(today ? OF_TODAY : at.getFullYear() === now.getFullYear() ? OF_THIS_YEAR : OF_ANY_YEAR, text, more);
}

/** The same to the minute, always with its date. */
export const dated = (text) => formatted(DATED, text);

function formatted(format, text, more = "") {
  const utc = `${text.replace("T", " ").replace("Z", "")} UTC`;
  return h("time", { datetime: text, title: more ? `${utc} · ${more}` : utc, class: "nowrap" }, format.format(new Date(text)));
}

/** The time in an HLC; as it stands where no calendar has such a time. */
export function timeOfHlc(hlc) {
  const at = new Date(Number(hlc.split(":")[0]));
  return Number.isNaN(at.valueOf()) ? h("code", {}, hlc) : time(at.toISOString(), hlc);
}

/** How long ago a time was, in words. */
export function ago(text) {
  const seconds = Math.round((new Date(text) - Date.now()) / 1000);
  const [unit, size] = UNITS.find(([, each]) => Math.abs(seconds) >= each) ?? ["second", 1];
  return AGO.format(Math.trunc(seconds / size), unit);
}

/** A length of time in its two largest units, rounded as reports have it: `350 ms`, `3.2 s`, `2 min 5 s`, `3 d 4 h`. */
export function duration(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.max(60, ms / 1000);
  const at = UNITS.findIndex(([, size]) => seconds >= size);
  const [[unit, size], [next, smaller]] = UNITS.slice(at, at + 2);
  const whole = Math.round(seconds / smaller);
  const parts = size / smaller;
  const short = { day: "d", hour: "h", minute: "min", second: "s" };
  return `${Math.floor(whole / parts)} ${short[unit]}${whole % parts ? ` ${whole % parts} ${short[next]}` : ""}`;
}

/** What a field for a local time holds, as RFC 3339; empty where it holds nothing. */
export function fromLocal(value) {
  return value ? new Date(value).toISOString() : "";
}

/** The reverse, to the minute, also of an HLC. */
export function toLocal(text) {
  if (!text) return "";
  const at = new Date(/^[0-9]+:/.test(text) ? Number(text.split(":")[0]) : text);
  return Number.isNaN(at.valueOf()) ? "" : new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
}
