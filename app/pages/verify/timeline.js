// The jobs that a file is about, and the entries of each, as the file has them.

import { code, counted, element, plain, timeOfMs } from "./element.js";
import { PAST } from "./facts.js";

const SHOWN_AT_ONCE = 25;

/** The list of jobs, with a way to search in it. ``ask`` is the engine's. */
export function timelineSection(jobs, ask) {
  const { items, actions, left } = jobs;
  const isOfJobs = items.some(({ isJob }) => isJob);
  const list = element("div", { class: "jobs" });
  const more = element("button", {
    type: "button",
    class: "button",
    hidden: true,
    onclick: () => show(shown + SHOWN_AT_ONCE),
  });
  const found = element("p", { class: "quiet", role: "status" });
  let shown = SHOWN_AT_ONCE;
  let wanted = "";
  const show = (count) => {
    shown = count;
    const matching = items.filter(({ jobId }) => jobId.toLowerCase().includes(wanted));
    list.replaceChildren(...matching.slice(0, shown).map((job) => jobDetails(job, ask)));
    found.textContent = wanted === "" ? "" : `${counted(matching.length, "match", "matches")}`;
    more.hidden = matching.length <= shown;
    more.textContent = `Show more (${(matching.length - Math.min(shown, matching.length)).toLocaleString("en")} left)`;
  };
  const search = element("input", {
    type: "search",
    id: "job-search",
    autocomplete: "off",
    spellcheck: "false",
    oninput: ({ target }) => {
      wanted = target.value.trim().toLowerCase();
      show(SHOWN_AT_ONCE);
    },
  });
  show(SHOWN_AT_ONCE);
  const what = isOfJobs ? counted(items.length, "job", "jobs") : counted(items.length, "subject", "subjects");
  const isSearchable = items.length > SHOWN_AT_ONCE;
  return element(
    "section",
    { class: "card", "aria-labelledby": "jobs-title" },
    element("h2", { id: "jobs-title" }, isOfJobs ? "Jobs in this file" : "Entries in this file"),
    element(
      "p",
      { class: "quiet" },
      `${what}${left ? ", and others" : ""}, as the entries here have them. Times are those of the nodes' clocks.`,
    ),
    element("ul", { class: "chips" }, ...actions.slice(0, 24).map(([action, count]) => actionChip(action, count))),
    isSearchable && element("p", { class: "search" }, element("label", { for: "job-search" }, "Find a job"), search),
    found,
    list,
    more,
  );
}

function actionChip(action, count) {
  return element(
    "li",
    {},
    element("span", {}, PAST[action] ?? plain(action, 60)),
    " ",
    element("b", {}, count.toLocaleString("en")),
  );
}

function jobDetails({ jobId, entries, firstMs, lastMs, lastAction }, ask) {
  const body = element("div", { class: "events" });
  const last = `${PAST[lastAction] ?? plain(lastAction, 60)}`;
  const details = element(
    "details",
    {
      ontoggle: async () => {
        if (!details.open || body.hasChildNodes()) return;
        const { rows, total } = await ask("events", { jobId });
        body.replaceChildren(eventList(rows));
        if (total > rows.length) body.append(element("p", { class: "quiet" }, `The first ${rows.length} of ${total}.`));
      },
    },
    element(
      "summary",
      {},
      code(jobId, "job"),
      element("span", { class: "last" }, last),
      element("span", { class: "when" }, spanOf(firstMs, lastMs)),
      element("span", { class: "count" }, counted(entries, "entry", "entries")),
    ),
    body,
  );
  return details;
}

/** From when to when, the day said once where it is one. */
function spanOf(firstMs, lastMs) {
  const [first, last] = [timeOfMs(firstMs), timeOfMs(lastMs)];
  if (first === last) return first;
  const isOneDay = first.slice(0, 11) === last.slice(0, 11);
  return `${first.replace(" UTC", "")} – ${isOneDay ? last.slice(11) : last}`;
}

/** The entries of one job, one below the other. */
export function eventList(rows) {
  return element("ol", { class: "timeline" }, ...rows.map(eventItem));
}

function eventItem(row) {
  const actor = actorOf(row);
  return element(
    "li",
    {},
    element(
      "p",
      { class: "event" },
      element("strong", {}, PAST[row.action] ?? plain(row.action, 60)),
      " ",
      element("time", { datetime: isoOf(row.hlc_physical) }, timeOfMs(row.hlc_physical)),
    ),
    element(
      "p",
      { class: "quiet" },
      `seq ${row.seq}, by node ${plain(row.hlc_node, 70)}${actor === null ? "" : `, sent by ${plain(actor, 200)}`}`,
      row.origin === null ? null : ", carried over from another log",
    ),
    element(
      "pre",
      { class: "payload", tabindex: "0", "aria-label": `Payload of seq ${row.seq}` },
      readable(row.payload),
    ),
  );
}

function isoOf(ms) {
  const time = new Date(ms);
  return Number.isNaN(time.getTime()) ? null : time.toISOString();
}

function actorOf({ payload }) {
  try {
    const { actor } = JSON.parse(payload);
    return typeof actor === "string" ? actor : null;
  } catch {
    return null;
  }
}

/** A payload with its characters as they were chained, but for what cannot be seen. */
function readable(payload) {
  return plain(payload, 20_000);
}

/** The rows around a break, with the one that it is about marked. */
export function rowsInPlace(rows, seq) {
  const columns = ["seq", "time", "job", "action", "previous link", "link"];
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Entries around the break" },
    element(
      "table",
      { class: "rows" },
      element("caption", {}, "The place in the file"),
      element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows.map((row) => placedRow(row, seq))),
    ),
  );
}

function placedRow(row, seq) {
  return element(
    "tr",
    row.seq === seq ? { class: "broken", "aria-label": "the break is here" } : {},
    element(
      "th",
      { scope: "row" },
      String(row.seq),
      row.seq === seq ? element("span", { class: "here" }, " here") : null,
    ),
    element("td", {}, timeOfMs(row.hlc_physical)),
    element("td", {}, code(row.job_id)),
    element("td", {}, plain(row.action, 60)),
    element("td", {}, row.prev_chain_link === null ? "none" : code(shortened(row.prev_chain_link))),
    element("td", {}, code(shortened(row.chain_link))),
  );
}

function shortened(hash) {
  return hash.length > 20 ? `${hash.slice(0, 10)}…${hash.slice(-6)}` : hash;
}
