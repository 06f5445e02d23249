// What a verification found: a verdict on each aspect, the first break, and how many breaks of each kind. The same
// kinds, aspects and rules as those of the service (ledger/verification/verdict.py).

export const ASPECT_OF_KIND = {
  gap: "links",
  "duplicate-seq": "links",
  "payload-digest": "payloads",
  "hlc-columns": "links",
  "prev-link": "links",
  link: "links",
  malformed: "payloads",
  head: "head",
  "tail-truncated": "head",
  "snapshot-root": "snapshots",
  "snapshot-signature": "signatures",
  "snapshot-chain": "snapshots",
  "caller-signature": "signatures",
  tree: "tree",
  projection: "projection",
  rollback: "checkpoint",
};
export const KINDS = Object.keys(ASPECT_OF_KIND);
export const ASPECTS = ["links", "payloads", "head", "snapshots", "signatures", "tree", "projection", "checkpoint"];

const CHAIN_KINDS = ["gap", "prev-link", "link"];
const TEXT_MAX = 400;

export class Findings {
  constructor() {
    this.first = new Map();
    this.counts = new Map();
    this.begun = new Set();
    this.undecided = new Set();
    this.hasBrokenSignature = false;
  }

  begin(...aspects) {
    for (const aspect of aspects) this.begun.add(aspect);
  }

  leaveUndecided(aspect) {
    this.undecided.add(aspect);
  }

  add(kind, seq, detail, { expected = null, actual = null, isKeyUnknown = false } = {}) {
    this.counts.set(kind, (this.counts.get(kind) ?? 0) + 1);
    if (ASPECT_OF_KIND[kind] === "signatures" && !isKeyUnknown) this.hasBrokenSignature = true;
    const held = this.first.get(kind);
    // Breaks of one kind and seq by what they say, so that it never matters which was found first.
    if (held === undefined || seq < held.seq || (seq === held.seq && detail < held.detail)) {
      this.first.set(kind, { seq, kind, detail, expected: shortened(expected), actual: shortened(actual) });
    }
  }

  /** Whether the chain breaks at or below ``seq``, so that what does not fit there says nothing more. */
  isChainBrokenBy(seq) {
    const twice = this.first.get("duplicate-seq");
    if (twice !== undefined && twice.seq < seq) return true;
    return CHAIN_KINDS.some((kind) => this.first.has(kind) && this.first.get(kind).seq <= seq);
  }

  /** Whether there is a break of any of these aspects. */
  has(...aspects) {
    return [...this.first.keys()].some((kind) => aspects.includes(ASPECT_OF_KIND[kind]));
  }

  /** Takes breaks that were found apart, of kinds that these have none of. */
  merge(others) {
    for (const [kind, found] of others.first) this.first.set(kind, found);
    for (const [kind, count] of others.counts) this.counts.set(kind, count);
  }

  firstBreak() {
    return [...this.first.values()].sort(byOrder)[0] ?? null;
  }

  breaks() {
    return Object.fromEntries(
      KINDS.filter((kind) => this.counts.has(kind)).map((kind) => [kind, this.counts.get(kind)]),
    );
  }

  verdicts() {
    return Object.fromEntries(ASPECTS.map((aspect) => [aspect, this.#verdict(aspect)]));
  }

  #verdict(aspect) {
    if (this.has(aspect)) {
      return aspect !== "signatures" || this.hasBrokenSignature ? "broken" : "unknown_key";
    }
    return this.begun.has(aspect) && !this.undecided.has(aspect) ? "ok" : "not_checked";
  }
}

/** Lowest seq first; breaks of the file itself, which no kind of a chain's names, before those of its entries. */
export function byOrder(one, other) {
  return one.seq - other.seq || KINDS.indexOf(one.kind) - KINDS.indexOf(other.kind);
}

function shortened(value) {
  if (typeof value !== "string" || value.length <= TEXT_MAX) return value;
  const characters = [...value];
  return characters.length <= TEXT_MAX
    ? value
    : `${characters.slice(0, TEXT_MAX).join("")}… (${characters.length} characters)`;
}
