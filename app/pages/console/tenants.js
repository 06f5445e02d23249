// Tenants: how far each is chained, covered by a checkpoint, signed; who witnessed it, and when.

import { get, getIfAllowed } from "./api.js";
import { count, facts, fill, h, panel, plural, short, table, tag, waiting } from "./dom.js";
import { named } from "./pick_tenant.js";
import { ago, time } from "./times.js";
import { quorumLine, witnessesOf, witnessTable } from "./witnesses.js";

const PAGE = 25;
const SNAPSHOTS_MAX = 10;

export async function tenants(ctx) {
  const place = h("div", {}, waiting("Reading the tenants"));
  ctx.show("Tenants", h("h1", {}, "Tenants"), place);
  const page = await get("/v1/tenants", { limit: PAGE, cursor: ctx.query.get("cursor") }, ctx.signal);
  const heads = await Promise.all(page.items.map((item) => getIfAllowed("/v1/chain/head", item, ctx.signal)));
  const rows = heads.filter(Boolean);
  fill(
    place,
    panel(
      null,
      table(
        "How far each tenant's chain has come",
        [
          {
            name: "Tenant",
            heads: true,
            of: (head) => h("a", { href: `#/tenant/${named(head.tenant_id)}` }, head.tenant_id),
          },
          { name: "Entries", number: true, of: (head) => count(head.seq) },
          { name: "Newest", of: (head) => time(head.at, head.hlc ?? "") },
          { name: "In a checkpoint", number: true, of: (head) => count(head.tree?.checkpoint_size ?? 0) },
          { name: "Signed", number: true, of: (head) => count(head.signed_to_seq) },
          { name: "State", of: (head) => stateOf(head) },
        ],
        rows,
        { unseen: true },
      ),
    ),
    page.next_cursor &&
      h(
        "a",
        { class: "button", href: `#/tenants?${new URLSearchParams({ cursor: page.next_cursor })}` },
        "More tenants",
      ),
    !rows.length && h("p", { class: "soft" }, "There is none yet. A tenant begins with its first event."),
  );
}

/** What is to be said of a head: what no signature covers yet, and what no checkpoint does. */
function stateOf(head) {
  const open = head.seq - (head.tree?.checkpoint_size ?? 0);
  const unsigned = head.seq - head.signed_to_seq;
  if (open > 0) return tag(`${plural(open, "entry", "entries")} in no checkpoint`, "warn");
  return unsigned > 0 ? tag(`${plural(unsigned, "entry", "entries")} to be signed`) : tag("✓ all signed", "ok");
}

export async function tenant(ctx) {
  const [name] = ctx.rest;
  const place = h("div", {}, waiting("Reading the chain"));
  ctx.show(name, h("h1", {}, "Tenant ", name), place);
  const log = `/v1/log/${named(name)}`;
  const [head, note, witnessed, stamped, signed] = await Promise.all([
    get("/v1/chain/head", { tenant_id: name }, ctx.signal),
    getIfAllowed(`${log}/checkpoint`, {}, ctx.signal).catch((error) => error),
    // What is wrong with the checkpoint stands in its own panel.
    witnessesOf(ctx, name),
    getIfAllowed(`${log}/anchors`, { limit: 1 }, ctx.signal),
    getIfAllowed("/v1/snapshots", { tenant_id: name, limit: SNAPSHOTS_MAX }, ctx.signal),
  ]);
  const unsigned = head.seq - head.signed_to_seq;
  fill(
    place,
    h(
      "p",
      { class: "row actions" },
      linkTo("Jobs", "jobs", name),
      linkTo("Nodes", "nodes", name),
      linkTo("Verify", "verify", name),
      linkTo("Retention", "retention", name),
      linkTo("Bundles", "bundles", name),
      linkTo("Who read it", "access", name),
    ),
    h(
      "div",
      { class: "grid" },
      panel(
        "Chain",
        facts({
          Entries: count(head.seq),
          Newest: [time(head.at, head.hlc ?? ""), head.at && ` (${ago(head.at)})`],
          "Its link": short(head.chain_link, 24),
          "Signed to": [
            count(head.signed_to_seq),
            " ",
            unsigned ? tag(`${plural(unsigned, "entry", "entries")} to be signed`) : tag("✓ all", "ok"),
          ],
        }),
      ),
      panel(
        "Newest checkpoint",
        typeof note === "string"
          ? checkpoint(note, head)
          : h("p", { role: "alert" }, note ? note.message : "There is none yet."),
      ),
    ),
    panel("Witnesses", quorumLine(witnessed), witnessTable(witnessed, stamped?.items ?? [])),
    signed?.items.length > 0 && panel(null, snapshots(signed.items)),
  );
}

const linkTo = (text, page, name) => h("a", { class: "button", href: `#/${page}/${named(name)}` }, text);

function checkpoint(note, head) {
  const [body, signatures = ""] = note.split("\n\n");
  const [origin, size, root] = body.split("\n");
  const signers = signatures
    .split("\n")
    .filter((line) => line.startsWith("— "))
    .map((line) => line.split(" ")[1]);
  const behind = head.seq - Number(size);
  return [
    facts({
      Covers: [
        `${plural(Number(size), "entry", "entries")} `,
        behind > 0 ? tag(`${count(behind)} behind`, "warn") : tag("✓ all", "ok"),
      ],
      Log: h("code", {}, origin),
      Root: short(root, 24),
      "Signed by": [...new Set(signers)].map((each) => h("div", {}, h("code", {}, each))),
    }),
    h("details", {}, h("summary", {}, "As it was signed"), h("pre", { tabindex: "0" }, note)),
  ];
}

function snapshots(items) {
  return table(
    "Signed batches, newest first",
    [
      { name: "Batch", heads: true, of: (item) => count(item.id) },
      { name: "Entries", of: (item) => `${count(item.from_seq)} to ${count(item.to_seq)}` },
      { name: "Signed", of: (item) => time(item.snapshot_at, item.snapshot_hlc) },
      { name: "Merkle root", of: (item) => short(item.merkle_root, 20) },
    ],
    items,
  );
}
