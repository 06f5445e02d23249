// Which proposals are accepted, and what is promised (ledger/machines/commitments.py): every verdict of a chain is
// judged once more, and must be what judging gives, to the byte (ledger/verification/commitment_check.py).

import { Malformed } from "./encoding.js";
import { canonical } from "./json.js";
import {
  ANY_ACCELERATOR,
  amountOf,
  amountsOf,
  checkKnown,
  limitOf,
  moduleSubject,
  nodeSubject,
  readCapacity,
  readCarried,
  readProposal,
  subjectOf,
} from "./proposals.js";

const ACCEPTED = "PROPOSE_ACCEPTED";
const REJECTED = "PROPOSE_REJECTED";
const CAPACITY_SET = "CAPACITY_SET";
const CLAIMS_LOOKED_AT_MAX = 64;
// The first rules by which a known capacity binds, and adjustments are of no older epoch.
const CAPACITY_BINDS_FROM = 2;

const ACTIONS = new Set([ACCEPTED, REJECTED, CAPACITY_SET]);

/** Whether an entry is one whose verdict is judged; imported ones are history. */
export function isOfCommitments(row) {
  return ACTIONS.has(row.action) && row.origin === null;
}

/**
 * Takes the entries of commitments in the order of the chain, after those that left before ``floor``; says what is wrong
 * with them to ``report``.
 */
export class CommitmentJudge {
  constructor(report, floor = null) {
    this.report = report;
    this.right = new Commitments();
    if (floor?.facts.commitments) this.#carry(floor);
    // As recorded, from the first wrong verdict on: later ones hold where they are those of either.
    this.told = null;
    this.lastSeq = 0;
  }

  take(row) {
    // Of several of one seq the first counts.
    if (row.seq === this.lastSeq) return;
    this.lastSeq = row.seq;
    try {
      if (row.action === CAPACITY_SET) this.#takeCapacity(row);
      else this.#takeProposal(row, readProposal(row.payload));
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      this.report(row.seq, `${row.action} at seq ${row.seq}: ${error.message}`);
    }
  }

  #carry({ seq, toSeq, facts }) {
    try {
      this.right.carry(readCarried(facts.commitments, toSeq));
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      this.report(seq, `PRUNED at seq ${seq}: ${error.message}`);
    }
  }

  #takeCapacity(row) {
    const said = readCapacity(row.payload);
    for (const machine of [this.right, this.told]) machine?.setCapacity(said);
    this.#checkSubject(row, nodeSubject(said.node));
  }

  #takeProposal(row, proposal) {
    const { seq, action } = row;
    const { commitment } = proposal;
    const due = this.right.judge(proposal);
    const isRight = isVerdict(row, proposal, due);
    if (!isRight && (this.told === null || !isVerdict(row, proposal, this.told.judge(proposal)))) {
      const said = { expected: spelt(due), actual: action === ACCEPTED ? "accepted" : spelt(proposal.rejection) };
      this.report(seq, `the verdict of seq ${seq} is not what judging its proposal gives`, said);
    }
    if (!isRight && this.told === null) this.told = this.right.copy();
    if (due === null) this.right.apply(seq, proposal);
    if (this.told !== null && action === ACCEPTED) this.told.believe(seq, proposal);
    this.#checkSubject(row, subjectOf(commitment));
  }

  #checkSubject({ seq, job_id: jobId }, subject) {
    if (jobId === subject) return;
    const detail = `the job_id of seq ${seq} is not what its payload is about`;
    this.report(seq, detail, { expected: subject, actual: jobId });
  }
}

/** Whether the entry is the one that is made of the proposal where ``due`` is the verdict. */
function isVerdict(row, { facts, rejection }, due) {
  if (due === null || rejection === null || spelt(rejection) !== spelt(due)) {
    return due === null && rejection === null && row.action === ACCEPTED;
  }
  return row.action === REJECTED && canonical({ ...facts, rejection: toldOf(due) }) === row.payload;
}

/** A rejection as a payload has it: members that say nothing are left out. */
function toldOf({ reason, detail, free = null, blocking_index: blocking = null, epoch = null }) {
  const told = { reason, detail };
  if (free !== null) told.free = toldResources(free);
  if (blocking !== null) told.blocking_index = blocking;
  if (epoch !== null) told.epoch = epoch;
  return told;
}

function toldResources(resources) {
  const isSaid = ([name, amount]) => (name === ANY_ACCELERATOR ? Object.keys(amount).length > 0 : amount !== 0);
  return Object.fromEntries(Object.entries(resources).filter(isSaid));
}

/** The verdict as text, the same for equal verdicts: canonical JSON, since accelerators come in any order. */
function spelt(rejection) {
  return rejection === null ? "accepted" : canonical(toldOf(rejection));
}

/** The machine over one tenant's entries, in the order of its chain. */
class Commitments {
  constructor() {
    this.active = new Map();
    this.holders = new Map();
    this.nodes = new Map();
    this.newest = new Map();
    this.neighbours = new Map();
    this.rules = new Map();
  }

  copy() {
    const copied = new Commitments();
    for (const name of Object.keys(copied)) copied[name] = new Map(this[name]);
    return copied;
  }

  /** Why a proposal is to be rejected: its precondition first, then what always holds; null when it is not. */
  judge({ precondition, commitment, rules: first }) {
    const rules = this.#rulesInForce(first);
    return this.#judgePrecondition(precondition, rules) ?? this.#judgeCommitment(commitment, rules);
  }

  /** The version of the rules in force; ``first`` where no entry has set it. */
  #rulesInForce(first) {
    return checkKnown(this.rules.get("rules") ?? first);
  }

  #judgePrecondition(precondition, rules) {
    if (precondition.kind === "NodeFreeOf") return this.#judgeNode(precondition, rules);
    if (precondition.kind === "GangUnplaced") return this.#judgeGang(precondition.gang);
    if (precondition.kind !== "ModuleAdjustmentVersion") return null;
    const { index, epoch } = this.#newestAdjustment(precondition);
    if (epoch === precondition.epoch) return null;
    const { mission, module, epoch: expected } = precondition;
    const detail = `the newest adjustment of ${mission}/${module} is of epoch ${epoch}, not ${expected}`;
    return { reason: "adjustment-version", detail, blocking_index: index || null, epoch };
  }

  #newestAdjustment(named) {
    const index = this.newest.get(moduleSubject(named)) ?? 0;
    return { index, epoch: index ? this.active.get(index).epoch : 0 };
  }

  #judgeNode({ node, at_least: asked }, rules) {
    const known = this.nodes.get(node);
    if (known === undefined) return null;
    if (known.capacity !== null) {
      return this.#judgeFree(node, known, amountsOf(asked), rules, "node-not-free", "asked for");
    }
    for (const [name] of amountsOf(asked)) {
      const dimension = name.startsWith(`${ANY_ACCELERATOR}.`) ? ANY_ACCELERATOR : name;
      if (!known.reserved.has(dimension)) continue;
      const detail = `node ${node}: ${dimension} is claimed, and the node's capacity is not known`;
      return { reason: "node-not-free", detail, blocking_index: this.#claimOf(node, dimension) };
    }
    return null;
  }

  /** Whether all members together fit on each node of known capacity. */
  #judgeCapacity(commitment, rules) {
    if (rules < CAPACITY_BINDS_FROM) return null;
    for (const [node, claimed] of claimsOf(commitment)) {
      const known = this.nodes.get(node);
      if (known === undefined || known.capacity === null) continue;
      const wanted = [...claimed].filter(([name]) => name !== ANY_ACCELERATOR);
      const found = this.#judgeFree(node, known, wanted, rules, "over-capacity", "claimed");
      if (found !== null) return found;
    }
    return null;
  }

  /** Whether a node of known capacity has free what is wanted, pairs of a dimension and an amount. */
  #judgeFree(node, known, wanted, rules, reason, isWhat) {
    for (const [name, amount] of wanted) {
      const left = freeOf(known, name, rules);
      if (left >= amount) continue;
      const detail = `node ${node} has ${left} of ${name} free, ${amount} is ${isWhat}`;
      return { reason, detail, free: freeIn(known, wanted, rules), blocking_index: this.#claimOf(node, name) };
    }
    return null;
  }

  #judgeCommitment(commitment, rules) {
    switch (commitment.kind) {
      case "Placement":
        return this.#judgeMembers([commitment]) ?? this.#judgeCapacity(commitment, rules);
      case "GangPlacement":
        return (
          this.#judgeGang(commitment.gang) ??
          this.#judgeMembers(commitment.members) ??
          this.#judgeCapacity(commitment, rules)
        );
      case "IdentityBind":
        return this.#judgeIdentity(commitment.capsule);
      case "ModuleAdjustment":
        return judgeReplicas(commitment) ?? this.#judgeEpoch(commitment, rules);
      case "Revocation":
        return this.#judgeRevocation(commitment.index);
      case "RulesVersion":
        if (commitment.version > rules) return null;
        return {
          reason: "rules-in-force",
          detail: `rules ${rules} are in force, and only newer ones can replace them`,
        };
      default:
        return null;
    }
  }

  #judgeEpoch(adjustment, rules) {
    const { index, epoch } = this.#newestAdjustment(adjustment);
    if (rules < CAPACITY_BINDS_FROM || adjustment.epoch >= epoch) return null;
    const module = `${adjustment.mission}/${adjustment.module}`;
    const detail = `the newest adjustment of ${module} is of epoch ${epoch}, this one is of epoch ${adjustment.epoch}`;
    return { reason: "older-epoch", detail, blocking_index: index, epoch };
  }

  #judgeRevocation(index) {
    if (!this.active.has(index)) {
      return { reason: "not-active", detail: `there is no active commitment at index ${index}` };
    }
    if (this.active.get(index).kind !== "RulesVersion") return null;
    const detail = `the rules that index ${index} set in force stay until newer ones are`;
    return { reason: "not-revocable", detail };
  }

  #judgeIdentity(capsule) {
    const index = this.holders.get(`identity:${capsule}`);
    if (index === undefined) return null;
    const detail = `capsule ${capsule} has an identity, bound at index ${index}`;
    return { reason: "identity-bound", detail, blocking_index: index };
  }

  #judgeGang(gang) {
    const index = this.holders.get(`gang:${gang}`);
    if (index === undefined) return null;
    return { reason: "gang-placed", detail: `gang ${gang} is placed, at index ${index}`, blocking_index: index };
  }

  #judgeMembers(members) {
    const seen = new Set();
    for (const { capsule, reservation, limit = null } of members) {
      const over = limit && amountsOf(reservation).find(([name, amount]) => amount > amountOf(limit, name));
      if (over) {
        const [name, amount] = over;
        const detail = `capsule ${capsule} reserves ${amount} of ${name}, its limit is ${amountOf(limit, name)}`;
        return { reason: "reservation-over-limit", detail };
      }
      const index = this.holders.get(`capsule:${capsule}`);
      if (index !== undefined) {
        return {
          reason: "capsule-placed",
          detail: `capsule ${capsule} is placed, at index ${index}`,
          blocking_index: index,
        };
      }
      if (seen.has(capsule)) return { reason: "capsule-placed", detail: `capsule ${capsule} is in the gang twice` };
      seen.add(capsule);
    }
    return null;
  }

  /** The newest active commitment that claims the dimension there, null where that is too far back. */
  #claimOf(node, dimension) {
    const subject = nodeSubject(node);
    let index = this.newest.get(subject) ?? 0;
    for (let looked = 0; looked < CLAIMS_LOOKED_AT_MAX && index; looked++) {
      if (claimsOf(this.active.get(index)).get(node)?.has(dimension)) return index;
      index = this.neighbours.get(keyOf(subject, index)).older;
    }
    return null;
  }

  /** What holds from an entry on, which was accepted. Of two that hold one name the newer counts. */
  apply(index, { commitment, rules }) {
    this.rules.set("rules", this.#rulesInForce(rules));
    if (commitment.kind === "RulesVersion") this.rules.set("rules", commitment.version);
    if (commitment.kind === "Revocation") {
      this.#end(commitment.index);
      return;
    }
    this.active.set(index, commitment);
    for (const name of namesOf(commitment)) this.holders.set(name, index);
    for (const [node, claimed] of claimsOf(commitment)) {
      this.#changeReserved(node, claimed, 1n);
      this.#link(nodeSubject(node), index);
    }
    if (commitment.kind === "ModuleAdjustment") this.#link(moduleSubject(commitment), index);
  }

  /** Takes over what is in force at a floor. */
  carry({ rules, active, nodes }) {
    this.rules.set("rules", rules);
    for (const { index, commitment } of active) this.apply(index, { commitment, rules });
    for (const { node, capacity, overcommit = null } of nodes) this.setCapacity({ node, capacity, overcommit, rules });
    this.rules.set("rules", rules);
  }

  /** Applies what was accepted, as far as it can be. */
  believe(index, proposal) {
    const { kind, index: ended } = proposal.commitment;
    if (kind !== "Revocation" || this.active.has(ended)) this.apply(index, proposal);
  }

  setCapacity({ node, capacity, overcommit, rules }) {
    this.rules.set("rules", this.#rulesInForce(rules));
    this.nodes.set(node, { capacity, reserved: this.nodes.get(node)?.reserved ?? new Map(), overcommit });
  }

  #end(index) {
    const commitment = this.active.get(index);
    this.active.delete(index);
    for (const name of namesOf(commitment)) {
      if (this.holders.get(name) === index) this.holders.delete(name);
    }
    for (const [node, claimed] of claimsOf(commitment)) {
      this.#changeReserved(node, claimed, -1n);
      this.#unlink(nodeSubject(node), index);
    }
    if (commitment.kind === "ModuleAdjustment") this.#unlink(moduleSubject(commitment), index);
  }

  #changeReserved(node, claimed, sign) {
    const known = this.nodes.get(node) ?? { capacity: null, reserved: new Map(), overcommit: null };
    const reserved = new Map(known.reserved);
    for (const [dimension, amount] of claimed) {
      const sum = (reserved.get(dimension) ?? 0n) + sign * amount;
      if (sum === 0n) reserved.delete(dimension);
      else reserved.set(dimension, sum);
    }
    if (reserved.size || known.capacity !== null) this.nodes.set(node, { ...known, reserved });
    else this.nodes.delete(node);
  }

  /** ``index`` is the newest of its subject. */
  #link(subject, index) {
    const older = this.newest.get(subject) ?? 0;
    if (older) this.#change(subject, older, { newer: index });
    this.neighbours.set(keyOf(subject, index), { older, newer: 0 });
    this.newest.set(subject, index);
  }

  #unlink(subject, index) {
    const { older, newer } = this.neighbours.get(keyOf(subject, index));
    this.neighbours.delete(keyOf(subject, index));
    if (older) this.#change(subject, older, { newer });
    if (newer) this.#change(subject, newer, { older });
    else if (older) this.newest.set(subject, older);
    else this.newest.delete(subject);
  }

  #change(subject, index, changed) {
    const key = keyOf(subject, index);
    this.neighbours.set(key, { ...this.neighbours.get(key), ...changed });
  }
}

function keyOf(subject, index) {
  return `${index} ${subject}`;
}

function judgeReplicas({ mission, module, replicas }) {
  if (replicas >= 1) return null;
  const detail = `${mission}/${module} cannot have ${replicas} replicas; to end it, revoke its placements`;
  return { reason: "scale-to-zero", detail };
}

/** The names that only one active commitment may hold. */
function namesOf(commitment) {
  switch (commitment.kind) {
    case "Placement":
      return [`capsule:${commitment.capsule}`];
    case "GangPlacement":
      return [`gang:${commitment.gang}`, ...commitment.members.map(({ capsule }) => `capsule:${capsule}`)];
    case "IdentityBind":
      return [`identity:${commitment.capsule}`];
    default:
      return [];
  }
}

/** By node and dimension, what a commitment claims; accelerators by name and all together. */
function claimsOf(commitment) {
  const members = { Placement: [commitment], GangPlacement: commitment.members }[commitment.kind] ?? [];
  const claims = new Map();
  const add = (claimed, name, amount) => claimed.set(name, (claimed.get(name) ?? 0n) + BigInt(amount));
  for (const { node, reservation } of members) {
    if (!claims.has(node)) claims.set(node, new Map());
    for (const [name, amount] of amountsOf(reservation)) {
      add(claims.get(node), name, amount);
      if (name.startsWith(ANY_ACCELERATOR)) add(claims.get(node), ANY_ACCELERATOR, amount);
    }
  }
  return claims;
}

/** What a node of known capacity has free in one dimension, at least 0. */
function freeOf({ capacity, reserved, overcommit }, name, rules) {
  const amount = BigInt(amountOf(capacity, name));
  const limit = overcommit === null || rules < CAPACITY_BINDS_FROM ? amount : limitOf(overcommit, name, amount);
  const left = limit - (reserved.get(name) ?? 0n);
  return left > 0n ? left : 0n;
}

/** The same in all the dimensions that are wanted, as a payload can hold it. */
function freeIn(known, wanted, rules) {
  const free = {};
  const prefix = `${ANY_ACCELERATOR}.`;
  for (const [name] of wanted) {
    const left = freeOf(known, name, rules);
    const amount = left > BigInt(Number.MAX_SAFE_INTEGER) ? Number.MAX_SAFE_INTEGER : Number(left);
    // An accelerator may have any name, also one that a plain object inherits.
    if (name.startsWith(prefix)) (free[ANY_ACCELERATOR] ??= Object.create(null))[name.slice(prefix.length)] = amount;
    else free[name] = amount;
  }
  return free;
}
