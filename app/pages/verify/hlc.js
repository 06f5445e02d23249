// Hybrid logical clocks and the names of nodes and tenants (docs/formats/hlc.md).

import { Malformed, quoted } from "./encoding.js";

export const NODE_ID = /^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$/;
export const TENANT_ID = /^(?:_system|[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?)$/;

const TEXT = /^(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,9}):([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)$/;
const PHYSICAL_MS_MAX = 2n ** 63n - 1n;
const LOGICAL_MAX = 2 ** 32 - 1;

/** The HLC that a text spells: physical milliseconds, logical counter, node. */
export function parseHlc(text) {
  const match = typeof text === "string" ? TEXT.exec(text) : null;
  const hlc = match && { physicalMs: BigInt(match[1]), logical: Number(match[2]), nodeId: match[3], text };
  if (!hlc || hlc.physicalMs > PHYSICAL_MS_MAX || hlc.logical > LOGICAL_MAX) {
    throw new Malformed(`${quoted(text, 100)} is not an HLC`);
  }
  return hlc;
}

/** Negative, zero or positive, as ``one`` is before, at or after ``other``. */
export function compareHlcs(one, other) {
  for (const part of ["physicalMs", "logical", "nodeId"]) {
    if (one[part] !== other[part]) return one[part] < other[part] ? -1 : 1;
  }
  return 0;
}
