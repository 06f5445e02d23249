// Who confirmed a log from outside: how far, how late, who is at fault, and whether they are enough.

import { getIfAllowed } from "./api.js";
import { count, h, plural, table, tag } from "./dom.js";
import { named } from "./pick_tenant.js";
import { ago, time } from "./times.js";

const STATUSES = { ok: ["✓ holds", "ok"], broken: ["✕ broken", "bad"], unknown_key: ["✕ unknown key", "bad"] };

/** The witnesses of a tenant's log; null for who may not see them, and where its checkpoint cannot be read. */
export async function witnessesOf(ctx, tenant) {
  if (!ctx.session.may("audit", tenant)) return null;
  return getIfAllowed(`/v1/log/${named(tenant)}/witnesses`, {}, ctx.signal).catch(() => null);
}

/** Whether the quorum of the node's policy covers the newest checkpoint, and who is missing; null without a policy. */
export function quorumLine(witnessed) {
  const policy = witnessed?.policy;
  if (!policy) return null;
  const reach = `Quorum ${policy.quorum} covers ${count(policy.quorum_to_seq)} of ${plural(witnessed.tree_size, "entry", "entries")}. `;
  return h(
    "p",
    { class: "row" },
    policy.met ? tag("✓ quorum", "ok") : tag("below quorum", "warn"),
    ` ${reach}${policy.missing.join("; ")}`,
  );
}

/** That a receipt of entries up to `seq` is below the quorum; null where it is not, and without a policy. */
export function belowQuorum(witnessed, seq) {
  const policy = witnessed?.policy;
  if (!policy || policy.quorum_to_seq >= seq) return null;
  return [
    tag("below quorum", "warn"),
    ` Quorum ${policy.quorum} covers entries up to ${count(policy.quorum_to_seq)}, and this job goes to ${count(seq)}: `,
    "whoever verifies the receipt with that policy is told that it is incomplete (exit code 3). ",
    policy.missing.join("; "),
  ];
}

export function witnessTable(witnessed, stamps) {
  const rows = (witnessed?.witnesses ?? [])
    .map((each) => ({ who: each.name, what: "cosignature", ...each }))
    .concat(
      stamps.map((each) => ({ who: each.authority, what: "time stamp (RFC 3161)", status: "as it came", ...each })),
    );
  if (!rows.length)
    return h(
      "p",
      {},
      "Nobody outside has confirmed a checkpoint of this tenant. Whoever has the database and the key could still rewrite history for who never saw it: ",
      h("code", {}, "log.policy"),
      " and ",
      h("code", {}, "log.timestamp_authorities"),
      " change that.",
    );
  return table(
    "Who confirmed a checkpoint from outside, and up to where",
    [
      { name: "Who", heads: true, of: (row) => row.who },
      { name: "What", of: (row) => row.what },
      { name: "Up to entry", number: true, of: (row) => count(row.tree_size) },
      { name: "Behind", number: true, of: (row) => behind(witnessed, row) },
      { name: "When", of: (row) => row.time && [time(row.time), ` (${ago(row.time)})`] },
      {
        name: "Holds",
        of: (row) => [
          tag(...(STATUSES[row.status] ?? [row.status])),
          row.fault && [" ", tag("✕ at fault", "bad"), ` ${row.fault}`],
        ],
      },
    ],
    rows,
    { unseen: true },
  );
}

function behind(witnessed, row) {
  const entries = (witnessed?.tree_size ?? row.tree_size) - row.tree_size;
  return entries > 0 ? tag(count(entries), "warn") : "0";
}
