// Nodes of a tenant's cluster: what each has, what is reserved of it, and which of them are overbooked.

import { get } from "./api.js";
import { count, facts, fill, h, panel, plural, table, tag, waiting } from "./dom.js";
import { named, pickTenant } from "./pick_tenant.js";

const PAGE = 50;
const NAMES = { cpu_millis: "CPU", memory_bytes: "Memory", disk_bytes: "Disk", disk_bw_bps: "Disk bandwidth" };
const ACCELERATORS = "accelerators";
const NONE_YET = "No node is known. A scheduler records each with its capacity: PUT /v1/nodes/NAME/capacity.";

export async function nodes(ctx) {
  const [name] = ctx.rest;
  const overbooked = ctx.query.get("overbooked") === "true";
  const place = h("div", {}, waiting("Reading the nodes"));
  const address = (tenant, query = {}) => `#/nodes/${named(tenant)}?${new URLSearchParams(query)}`;
  ctx.show(
    `Nodes of ${name}`,
    h("h1", {}, "Nodes"),
    h("p", { class: "soft" }, "Machines, what the tenant's commitments reserve of each, and the commitments that hold now."),
    h(
      "p",
      { class: "row fields actions" },
      await pickTenant(ctx, name, (tenant) => address(tenant)),
      overbooked
        ? h("a", { class: "button", href: address(name) }, "All nodes")
        : h("a", { class: "button", href: address(name, { overbooked: true }) }, "Overbooked only"),
    ),
    place,
  );
  const asked = { tenant_id: name, limit: PAGE, cursor: ctx.query.get("cursor"), overbooked: overbooked || null };
  const after = ctx.query.get("after");
  const [found, active] = await Promise.all([
    get("/v1/nodes", asked, ctx.signal),
    get("/v1/commitments", { tenant_id: name, limit: PAGE, cursor: after }, ctx.signal),
  ]);
  const more = { ...(overbooked && { overbooked }), cursor: found.next_cursor };
  fill(
    place,
    found.rules < 2 && olderRules(found.rules),
    found.items.length
      ? panel(null, table(captionOf(found, overbooked), COLUMNS, found.items, { kind: kindOf }))
      : h("p", {}, overbooked ? "No node is overbooked." : NONE_YET),
    found.next_cursor && h("p", {}, h("a", { class: "button", href: address(name, more) }, "More nodes")),
    panel(
      null,
      active.items.length
        ? table(`Active commitments, as of entry ${count(active.as_of_seq)}`, commitmentColumns(name), active.items)
        : h("p", {}, after ? "There are no more active commitments." : "No commitment is active."),
    ),
    active.next_cursor &&
      h("a", { class: "button", href: address(name, { after: active.next_cursor }) }, "More commitments"),
  );
}

function captionOf({ items, as_of_seq: seq }, overbooked) {
  return `${plural(items.length, overbooked ? "overbooked node" : "node")}, as of entry ${count(seq)}`;
}

function olderRules(rules) {
  return h(
    "section",
    { class: "panel fault warn" },
    h("p", {}, `Rules ${rules} judge this tenant: a placement without NodeFreeOf may claim more than a node has.`),
    h("p", { class: "do" }, "Newer rules keep that from happening: docs/commitments.md, Versions of the rules."),
  );
}

const kindOf = (node) => node.overbooked && "broken";

const COLUMNS = [
  { name: "Node", heads: true, of: (node) => node.node },
  { name: "State", of: (node) => (node.overbooked ? tag("✕ overbooked", "bad") : tag("✓ fits", "ok")) },
  { name: "Reserved of its limit", of: (node) => dimensionsOf(node).map(used) },
  { name: "Free", minor: true, of: (node) => dimensionsOf(node).map(free) },
  { name: "Set by entry", number: true, minor: true, of: (node) => count(node.index) },
];

const commitmentColumns = (name) => [
  {
    name: "Entry",
    heads: true,
    of: ({ index }) => h("a", { href: `#/verify/${named(name)}?at=${index}` }, count(index)),
  },
  { name: "Commitment", of: ({ commitment }) => commitment.kind },
  { name: "Says", of: ({ commitment: { kind, ...said } }) => facts(mapped(said)) },
];

const mapped = (said) =>
  Object.fromEntries(
    Object.entries(said).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]),
  );

/** Each dimension of which a node has, or has reserved, anything: `{dimension, reserved, free, excess, factor}`. */
function dimensionsOf(node) {
  const flat = Object.fromEntries(
    ["capacity", "overcommit", "reserved", "free", "excess"].map((part) => [part, flattened(node[part])]),
  );
  const all = new Set([...flat.capacity.keys(), ...flat.reserved.keys()]);
  return [...all].map((dimension) => ({
    dimension,
    reserved: flat.reserved.get(dimension) ?? 0,
    free: flat.free.get(dimension) ?? 0,
    excess: flat.excess.get(dimension) ?? 0,
    factor: flat.overcommit.get(dimension) ?? "1",
  }));
}

function flattened({ [ACCELERATORS]: accelerators = {}, ...plain }) {
  const byName = Object.entries(accelerators).map(([name, each]) => [`${ACCELERATORS}.${name}`, each]);
  return new Map([...Object.entries(plain), ...byName]);
}

function used({ dimension, reserved, free: left, excess, factor }) {
  const limit = reserved + left - excess;
  const of = `${amount(dimension, reserved)} of ${amount(dimension, limit)}`;
  return h("div", {}, `${wordFor(dimension)}: ${of}`, factor !== "1" && ` (capacity × ${factor})`);
}

function free({ dimension, free: left, excess }) {
  if (excess > 0) return h("div", {}, `${wordFor(dimension)}: ${amount(dimension, excess)} too much`);
  return h("div", {}, `${wordFor(dimension)}: ${amount(dimension, left)}`);
}

const wordFor = (dimension) => NAMES[dimension] ?? dimension.slice(ACCELERATORS.length + 1);

/** An amount as people say it: CPUs, and bytes in GiB. */
function amount(dimension, value) {
  if (dimension === "cpu_millis") return count(value / 1000);
  if (dimension === "memory_bytes" || dimension === "disk_bytes") return `${count(value / 2 ** 30)} GiB`;
  return count(value);
}
