// Callers that sign their events: whose keys count, since when, and which events must be signed.

import { ask, get, getIfAllowed, readiness } from "./api.js";
import { confirm } from "./confirm.js";
import { field, fill, h, panel, table, tag, waiting } from "./dom.js";
import { CHECKS, EVENTS } from "./facts.js";
import { named } from "./pick_tenant.js";
import { time, timeOfHlc } from "./times.js";

const DATED_MAX = 50;

export async function callers(ctx) {
  const { session } = ctx;
  const place = h("div", {}, waiting("Reading the callers"));
  ctx.show(
    "Callers",
    h("h1", {}, "Callers"),
    h(
      "p",
      { class: "soft" },
      "Who signs events with a key of its own, so that not even this ledger can make them in its name.",
    ),
    place,
  );
  const draw = async () => {
    const [found, { checks }] = await Promise.all([get("/v1/callers", {}, ctx.signal), readiness(ctx.signal)]);
    const registered = await registrations(ctx, found.callers);
    fill(
      place,
      checks.admission && !checks.admission.ok && notAdmitted(checks.admission),
      panel(null, keyTable(ctx, found.callers, registered, again)),
      panel(null, required(found)),
      session.may("admin") &&
        h("div", { class: "grid" }, registerForm(ctx, again), await requireForm(ctx, found, again)),
    );
  };
  const again = () => draw().catch((error) => error.name !== "AbortError" && ctx.fail(error, place));
  await draw();
}

/** By key id, the entry that registered each; of nobody for who may not read the ledger's own chain. */
async function registrations(ctx, items) {
  if (!ctx.session.may("audit", "_system")) return new Map();
  const entryOf = async ({ key_id: id }) => {
    const address = `/v1/jobs/${named(`caller:${id}`)}/events`;
    const page = await getIfAllowed(address, { tenant_id: "_system", limit: 1 }, ctx.signal);
    return [id, page?.items[0]];
  };
  return new Map(await Promise.all(items.slice(0, DATED_MAX).map(entryOf)));
}

function notAdmitted({ detail }) {
  return h(
    "section",
    { class: "panel fault warn", role: "alert" },
    h("h2", {}, "Nothing can be changed here at this node"),
    h("p", {}, detail),
    h("p", { class: "do" }, h("b", {}, "What to do: "), CHECKS.admission.remedy),
  );
}

function keyTable(ctx, items, registered, again) {
  if (!items.length) return [h("h2", {}, "Keys"), h("p", {}, "No caller signs events.")];
  const columns = [
    { name: "Caller", heads: true, of: (caller) => caller.name },
    { name: "Key", of: (caller) => h("code", {}, caller.key_id) },
    { name: "Algorithm", of: (caller) => h("code", {}, caller.algorithm) },
    { name: "Tenants", of: (caller) => h("code", {}, caller.tenants.join(", ")) },
    { name: "Since", of: (caller) => sinceOf(registered.get(caller.key_id)) },
    {
      name: "State",
      of: ({ revoked_from_hlc: from }) =>
        from ? [tag("revoked", "bad"), " from ", timeOfHlc(from)] : tag("counts", "ok"),
    },
    { name: "Revoke", of: (caller) => !caller.revoked_from_hlc && revokeButton(ctx, caller, again) },
  ];
  const mayRevoke = ctx.session.may("admin");
  return table("Keys of callers, and whose events they sign", mayRevoke ? columns : columns.slice(0, -1), items);
}

function sinceOf(entry) {
  return entry ? [time(entry.at, entry.hlc), entry.payload.registered_by && ` by ${entry.payload.registered_by}`] : "–";
}

function required({ signatures_required: requirements }) {
  const newest = [...newestOf(requirements).values()].filter(({ types }) => types.length);
  if (!newest.length)
    return [h("h2", {}, "Events that must be signed"), h("p", {}, "None: events are taken signed or not.")];
  return table(
    "Events that must be signed: others of these types are refused, and named by every verifier",
    [
      {
        name: "Tenant",
        heads: true,
        of: (each) => h("a", { href: `#/tenant/${named(each.tenant_id)}` }, each.tenant_id),
      },
      { name: "Events", of: (each) => each.types.join(", ") },
      { name: "From", of: (each) => timeOfHlc(each.from_hlc) },
    ],
    newest,
  );
}

/** What counts for each tenant: the newest, as they are listed by time. */
const newestOf = (requirements) => new Map(requirements.map((each) => [each.tenant_id, each]));

function revokeButton(ctx, caller, again) {
  const { key_id: id, name } = caller;
  const ask_ = () => {
    const reason = h("input", { name: "reason", required: true, maxlength: "1000", autocomplete: "off" });
    confirm(
      ctx,
      { title: `Revoke the key of ${name}?`, yes: "Revoke", no: "Keep it" },
      [
        h(
          "p",
          {},
          "In two seconds no event that ",
          h("code", {}, id),
          " signs counts any more. It is never registered again.",
        ),
        field("Reason, which goes on record", reason),
      ],
      async () => {
        await ask("DELETE", `/v1/callers/${named(id)}`, { query: { reason: reason.value } });
        ctx.say(`The key of ${name} is revoked`);
        again();
      },
    );
  };
  return h(
    "button",
    { type: "button", class: "danger quiet", "aria-label": `Revoke ${name} ${id}`, onclick: ask_ },
    "Revoke",
  );
}

function registerForm(ctx, again) {
  const name = h("input", { name: "name", required: true, maxlength: "128", autocomplete: "off", spellcheck: "false" });
  const tenants = h("input", {
    name: "tenants",
    required: true,
    placeholder: "nightly team-*",
    autocomplete: "off",
    spellcheck: "false",
  });
  const key = h("textarea", {
    name: "key",
    required: true,
    rows: "5",
    spellcheck: "false",
    placeholder: "-----BEGIN PUBLIC KEY-----",
  });
  const told = h("p", { role: "alert" });
  const run = (event) => {
    event.preventDefault();
    fill(told);
    if (key.value.includes("PRIVATE KEY")) {
      return void fill(
        told,
        "This is a private key: keep it to yourself, and give its public half here. Nothing was sent.",
      );
    }
    const wanted = { name: name.value.trim(), tenants: tenants.value.trim().split(/[ ,]+/), public_key_pem: key.value };
    confirm(
      ctx,
      { title: `Register a key of ${wanted.name}?`, yes: "Register", no: "Cancel", kind: "main" },
      h(
        "p",
        {},
        "It signs events of ",
        h("code", {}, wanted.tenants.join(", ")),
        ". That goes on record, and can be revoked, not undone.",
      ),
      async () => {
        const { key_id: id } = await ask("POST", "/v1/callers", { json: wanted });
        ctx.say(`Key ${id} of ${wanted.name} is registered`);
        again();
      },
    );
  };
  return panel(
    "Register a caller",
    h(
      "form",
      { onsubmit: run },
      h("div", { class: "row" }, field("Name", name), field("Tenants", tenants)),
      field("Public key: Ed25519, P-256 or ML-DSA-44, in PEM", key),
      told,
      h("button", { class: "main" }, "Register"),
    ),
  );
}

async function requireForm(ctx, found, again) {
  const { names } = await ctx.session.tenants();
  const present = newestOf(found.signatures_required);
  const boxes = Object.keys(EVENTS).map((type) => h("input", { type: "checkbox", name: "type", value: type }));
  const tick = () => {
    const types = present.get(tenant.value.trim())?.types ?? [];
    for (const box of boxes) box.checked = types.includes(box.value);
  };
  const tenant = h("input", {
    name: "tenant",
    required: true,
    list: "signing-tenants",
    autocomplete: "off",
    spellcheck: "false",
    onchange: tick,
  });
  const run = (event) => {
    event.preventDefault();
    const of = tenant.value.trim();
    const types = boxes.filter((box) => box.checked).map((box) => box.value);
    confirm(
      ctx,
      { title: `Change what must be signed in ${of}?`, yes: "Require", no: "Cancel", kind: "main" },
      types.length
        ? h(
            "p",
            {},
            `This ledger refuses ${types.join(", ")} of ${of} unless a caller signed it. Callers that do not sign yet fail.`,
          )
        : h("p", {}, `No event of ${of} need be signed any more.`),
      async () => {
        await ask("PUT", `/v1/tenants/${named(of)}/signatures`, { json: { types } });
        ctx.say(`What must be signed in ${of} is changed`);
        again();
      },
    );
  };
  return panel(
    "What must be signed",
    h(
      "form",
      { onsubmit: run },
      h(
        "datalist",
        { id: "signing-tenants" },
        names.map((name) => h("option", { value: name })),
      ),
      field("Tenant", tenant),
      h(
        "fieldset",
        { class: "choices" },
        h("legend", {}, "Events"),
        boxes.map((box) => h("label", {}, box, box.value)),
      ),
      h("button", { class: "main" }, "Require"),
    ),
  );
}
