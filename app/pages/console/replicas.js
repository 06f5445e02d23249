// Who else holds what this node writes: safekeepers, and other ledgers that it imports from.

import { get, getIfAllowed } from "./api.js";
import { count, facts, fill, h, panel, table, tag, waiting } from "./dom.js";

export async function replicas(ctx) {
  const place = h("div", {}, waiting("Asking"));
  ctx.show("Replicas", h("h1", {}, "Replicas"), place);
  const [node, exchange] = await Promise.all([
    get("/v1/node", {}, ctx.signal),
    ctx.session.may("audit") ? getIfAllowed("/v1/exchange", {}, ctx.signal) : null,
  ]);
  const members = node.members ?? [];
  fill(
    place,
    panel(
      "This node",
      facts({
        Node: h("code", {}, node.node_id),
        Log: h("code", {}, node.wal_id),
        Epoch: count(node.epoch),
        Acknowledges: h("code", {}, node.ack_mode),
        Committed: count(node.positions.commit_lsn),
        "PostgreSQL survives the loss of": `a ${node.topology.postgres_survives}`,
      }),
    ),
    panel(
      null,
      members.length
        ? table(
            "Safekeepers of this node's log",
            [
              { name: "Member", heads: true, of: (each) => h("code", {}, each.address) },
              { name: "Region", of: (each) => each.region },
              { name: "State", of: (each) => (each.in_sync ? tag("✓ in sync", "ok") : tag("✕ not in sync", "bad")) },
              { name: "Holds up to", number: true, of: (each) => count(each.last_replicated_lsn) },
              { name: "Behind", number: true, of: (each) => count(each.lag_lsn) },
              { name: "Why", of: (each) => each.fault ?? "–" },
            ],
            members,
          )
        : [
            h("h2", {}, "Safekeepers"),
            h(
              "p",
              {},
              "None: what is not chained yet is on this node's disk alone. ",
              h("code", {}, "replication.members"),
              " names some (docs/replication.md).",
            ),
          ],
    ),
    exchange &&
      panel(
        null,
        exchange.peers.length
          ? table(
              "Other ledgers that this one imports from",
              [
                { name: "Ledger", heads: true, of: (peer) => h("code", {}, peer.url) },
                { name: "Region", of: (peer) => peer.region },
                { name: "State", of: stateOf },
                { name: "Lacking", number: true, of: (peer) => count(peer.lag_entries) },
                { name: "Imported", number: true, of: (peer) => count(peer.imported_entries) },
                { name: "Why", of: (peer) => peer.retired?.reason ?? peer.fault ?? "–" },
              ],
              exchange.peers,
            )
          : [
              h("h2", {}, "Exchange"),
              h(
                "p",
                {},
                "With no other ledger. ",
                h("code", {}, "exchange.peers"),
                " names some (docs/replication.md).",
              ),
            ],
      ),
  );
}

function stateOf(peer) {
  if (peer.retired) return tag("retired", "");
  if (peer.waits_for.length) return tag("✕ waits for a key", "bad");
  return peer.fault ? tag("✕ fault", "bad") : tag("✓ follows", "ok");
}
