// Webhooks of a tenant: to whom its entries are delivered, how far each has confirmed, and what it refused.

import { ask, get } from "./api.js";
import { confirm } from "./confirm.js";
import { count, field, fill, h, panel, plural, refill, table, tag, waiting } from "./dom.js";
import { keepUp } from "./overview.js";
import { named, pickTenant } from "./pick_tenant.js";
import { time } from "./times.js";

const STATES = {
  delivering: ["✓ delivering", "ok"],
  failing: ["! failing", "warn"],
  stopped: ["✕ stopped", "bad"],
  paused: ["‖ paused", "warn"],
};
const FORMATS = ["standard", "cloudevents", "cloudevents-batch", "ocsf"];

export async function webhooks(ctx) {
  const [name] = ctx.rest;
  const places = {
    secret: h("div", { role: "alert" }),
    told: h("p", { role: "status" }),
    list: h("div", {}, waiting("Reading the webhooks")),
  };
  const draw = async () => {
    const { items } = await get("/v1/webhooks", { tenant_id: name }, ctx.signal);
    const caption = `${plural(items.length, "webhook")} of ${name}`;
    refill(
      places.list,
      panel(null, items.length ? table(caption, columns(ctx, changed), items) : h("p", {}, `${name} has no webhook.`)),
      ...items.filter((each) => each.dead_letter_count).map((each) => deadLetters(ctx, name, each)),
    );
  };
  /** Say what was done, or why not, and show the webhooks as they are then. */
  const changed = (text) => {
    fill(places.told, text);
    draw().catch((error) => ctx.fail(error, places.list));
  };
  ctx.show(
    `Webhooks of ${name}`,
    h("h1", {}, "Webhooks"),
    h(
      "p",
      { class: "soft" },
      "Receivers to which this ledger delivers the tenant's entries, in order and signed, until each confirms them.",
    ),
    h("p", { class: "row actions" }, await pickTenant(ctx, name, (tenant) => `#/webhooks/${named(tenant)}`)),
    places.secret,
    places.told,
    places.list,
    addForm(ctx, name, places, changed),
  );
  await keepUp(ctx, draw);
}

const columns = (ctx, changed) => [
  {
    name: "Receiver",
    heads: true,
    of: (each) => [each.url, h("div", { class: "soft" }, each.format), h("code", { class: "soft" }, each.webhook_id)],
  },
  { name: "Entries", of: (each) => [each.actions?.join(", ") ?? "all", each.job && ` of job ${each.job}`] },
  {
    name: "State",
    of: (each) => [
      tag(...STATES[each.state]),
      each.failing_since && [" since ", time(each.failing_since)],
      each.last_error && h("div", {}, each.last_error),
    ],
  },
  { name: "Confirmed to", number: true, of: (each) => count(each.delivered_seq) },
  { name: "Waiting", number: true, of: (each) => count(each.backlog_entries) },
  { name: "Last confirmed", minor: true, of: (each) => time(each.delivered_at) },
  { name: "Added", minor: true, of: (each) => [time(each.created_at), each.created_by && ` by ${each.created_by}`] },
  {
    name: "Change",
    of: (each) => [
      each.dead_letter_count > 0 && button("Deliver again", each, () => again(ctx, each, changed)),
      " ",
      ["stopped", "paused"].includes(each.state)
        ? button("Resume", each, () => move(each, "resume", changed))
        : button("Pause", each, () => move(each, "pause", changed)),
      " ",
      each.delivered_seq > 0 && button("Replay", each, () => replay(ctx, each, changed)),
      " ",
      button("Delete", each, () => remove(ctx, each, changed), "danger"),
    ],
  },
];

const button = (text, { url }, onclick, kind = "") =>
  h("button", { type: "button", class: `quiet actions ${kind}`, "aria-label": `${text}: ${url}`, onclick }, text);

function deadLetters(ctx, name, { url, dead_letter_count: all, dead_letters: letters }) {
  const columns = [
    {
      name: "Entry",
      heads: true,
      of: ({ seq }) => h("a", { href: `#/verify/${named(name)}?at=${seq}` }, count(seq)),
    },
    { name: "Refused", of: (each) => time(each.at) },
    { name: "Why", of: (each) => each.reason },
    { name: "State", of: (each) => (each.redelivering ? tag("being delivered again") : tag("kept", "warn")) },
  ];
  const caption = `Dead letters of ${url}: ${plural(all, "entry", "entries")} that it refused${all > letters.length ? `, the first ${letters.length}` : ""}`;
  return panel(null, table(caption, columns, letters));
}

/** Pause a webhook, or let it go on: its position stays, so nothing is lost by either. */
async function move({ webhook_id: id, url }, how, changed) {
  try {
    await ask("POST", `/v1/webhooks/${named(id)}/${how}`);
    changed(`${url} is ${how}d.`);
  } catch (error) {
    changed(`${url} is not ${how}d: ${error.message}`);
  }
}

function again(ctx, { webhook_id: id, url }, changed) {
  confirm(
    ctx,
    { title: "Deliver again?", yes: "Deliver", no: "Cancel", kind: "main" },
    h("p", {}, `${url} gets its dead letters once more, before all else; if it was stopped, it goes on.`),
    async () => {
      await ask("POST", `/v1/webhooks/${named(id)}/redeliver`);
      changed(`${url} gets its dead letters once more.`);
    },
  );
}

/** Deliver all from an entry on again, for a receiver that lost what it had. */
function replay(ctx, { webhook_id: id, url, delivered_seq: to, state }, changed) {
  const from = h("input", { name: "from_seq", type: "number", min: "1", max: String(to), required: true, value: "1" });
  const isHeld = ["stopped", "paused"].includes(state);
  confirm(
    ctx,
    { title: "Replay from an entry on?", yes: "Replay", no: "Cancel", kind: "main" },
    [
      h(
        "p",
        {},
        `${url} has confirmed all up to entry ${count(to)}. It gets what it takes of these once more, from the entry that you name on, as it came at first: a receiver that passes over what it has must forget its position before.`,
      ),
      isHeld && h("p", {}, `It is ${state}: it gets nothing until it is resumed.`),
      field("From entry", from),
    ],
    async () => {
      const first = Number(from.value);
      await ask("POST", `/v1/webhooks/${named(id)}/replay`, { json: { from_seq: first } });
      changed(
        `${url} gets all from entry ${count(first)} on once more${isHeld ? ", once it is resumed" : ", after the message that is under way"}.`,
      );
    },
  );
}

function remove(ctx, { webhook_id: id, url }, changed) {
  confirm(
    ctx,
    { title: "Delete this webhook?", yes: "Delete", no: "Keep it" },
    h(
      "p",
      {},
      `Nothing more is delivered to ${url}, and its dead letters are forgotten. The entries stay in the chain.`,
    ),
    async () => {
      await ask("DELETE", `/v1/webhooks/${named(id)}`);
      changed(`${url} is deleted.`);
    },
  );
}

function addForm(ctx, name, places, changed) {
  const text = (key, more = {}) => h("input", { name: key, autocomplete: "off", spellcheck: "false", ...more });
  const url = text("url", {
    type: "url",
    required: true,
    maxlength: "2048",
    placeholder: "https://receiver.example.org",
  });
  const actions = text("actions", { placeholder: "all" });
  const job = text("job", { placeholder: "all" });
  const from = text("from_seq", { type: "number", min: "1", placeholder: "from now on" });
  const format = h(
    "select",
    { name: "format" },
    FORMATS.map((each) => h("option", { value: each }, each)),
  );
  const told = h("p", { role: "alert" });
  const run = async (event) => {
    event.preventDefault();
    fill(told);
    const wanted = { tenant_id: name, url: url.value.trim() };
    const words = actions.value.toUpperCase().split(/[ ,]+/).filter(Boolean);
    if (words.length) wanted.actions = words;
    if (job.value.trim()) wanted.job = job.value.trim();
    if (format.value !== FORMATS[0]) wanted.format = format.value;
    if (from.value) wanted.from_seq = Number(from.value);
    try {
      const { secret } = await ask("POST", "/v1/webhooks", { json: wanted });
      event.target.reset();
      fill(places.secret, secretOf(wanted.url, secret));
      places.secret.querySelector("code").focus();
      changed(`${wanted.url} is added.`);
    } catch (error) {
      fill(told, `Not added: ${error.message}`);
    }
  };
  return panel(
    "Add a webhook",
    h(
      "form",
      { onsubmit: run },
      h("p", {}, "The receiver gets payloads of the tenant for good. That is on record with your name."),
      h(
        "div",
        { class: "row" },
        field("Address", url),
        field("Format", format),
        field("Actions", actions),
        field("Job", job),
        field("From entry", from),
      ),
      told,
      h("button", { class: "main" }, "Add"),
    ),
  );
}

/** The secret of a new webhook, which the service shows once. */
function secretOf(url, secret) {
  return panel(
    "The secret of the new webhook",
    h("p", {}, `${url} checks with it that messages are of this ledger. Keep it now: it is never shown again.`),
    h("pre", { tabindex: "-1" }, h("code", { tabindex: "0" }, secret)),
  );
}
