// What proposals and capacities say, as payloads of entries have them (ledger/machines/promises.py).

import { Malformed } from "./encoding.js";
import { isInteger, isObject, isText, parseJson } from "./json.js";

export const ANY_ACCELERATOR = "accelerators";

/** The newest version of the rules that this page knows, and the one of entries that name none. */
const RULES_NEWEST = 2;
const RULES_BEFORE_VERSIONS = 1;

const AMOUNTS = ["cpu_millis", "memory_bytes", "disk_bytes", "disk_bw_bps"];

const isAmount = (value) => isInteger(value);
const isFactor = (value) => typeof value === "string" && /^[1-9][0-9]{0,2}(?:\.[0-9]{1,3})?$/.test(value);
const isName = (value) => isText(value);
const isList = (isItem) => (value) => Array.isArray(value) && value.every(isItem);

/** Whether a value has a member that is ``isEach`` for some of the dimensions. */
const isByDimension = (isEach) => (value) =>
  isObject(value) &&
  Object.entries(value).every(([name, each]) =>
    name === ANY_ACCELERATOR
      ? isObject(each) && Object.values(each).every(isEach)
      : AMOUNTS.includes(name) && isEach(each),
  );
const isResources = isByDimension(isAmount);
const isOvercommit = isByDimension(isFactor);

const isLimit = (value) => value === null || isResources(value);
const isMember = (value) =>
  isOf(value, { capsule: isName, node: isName, reservation: isResources }, { limit: isLimit });

const COMMITMENTS = {
  Placement: [{ capsule: isName, node: isName, reservation: isResources }, { limit: isLimit }],
  GangPlacement: [{ gang: isName, members: isList(isMember) }],
  IdentityBind: [{ capsule: isName, identity: isName }],
  ModuleAdjustment: [{ mission: isName, module: isName, replicas: isAmount, epoch: isAmount }],
  QuotaGrant: [{ subject: isName, resources: isResources }],
  Lease: [{ resource: isName, holder: isName }],
  Revocation: [{ index: isAmount }],
  RulesVersion: [{ version: (value) => isAmount(value) && value >= 1 && value <= RULES_NEWEST }],
};
const PRECONDITIONS = {
  None: [{}],
  NodeFreeOf: [{ node: isName, at_least: isResources }],
  GangUnplaced: [{ gang: isName }],
  ModuleAdjustmentVersion: [{ mission: isName, module: isName, epoch: isAmount }],
};

/** Whether a value has exactly these members, and maybe some of the others, each of its form. */
function isOf(value, needed, optional = {}) {
  if (!isObject(value)) return false;
  const forms = { ...needed, ...optional };
  const isKnown = Object.keys(value).every((name) => Object.hasOwn(forms, name) && forms[name](value[name]));
  return isKnown && Object.keys(needed).every((name) => Object.hasOwn(value, name));
}

function isKind(value, kinds) {
  if (!isObject(value) || !Object.hasOwn(kinds, String(value.kind))) return false;
  const { kind, ...fields } = value;
  return isOf(fields, ...kinds[kind]);
}

function isRejection(value) {
  const optional = (name, isForm) => value[name] === undefined || value[name] === null || isForm(value[name]);
  const isIndex = (index) => Number.isSafeInteger(index);
  return (
    isObject(value) &&
    isText(value.reason) &&
    isText(value.detail) &&
    optional("free", isResources) &&
    optional("blocking_index", isIndex) &&
    optional("epoch", isIndex)
  );
}

/** The proposal that a payload is: commitment, precondition, and why it was rejected, null where it was not. */
export function readProposal(payload) {
  const facts = parseJson(payload, "the payload");
  const rejection = isObject(facts) ? (facts.rejection ?? null) : undefined;
  const isProposal =
    rejection !== undefined &&
    isKind(facts.commitment, COMMITMENTS) &&
    isKind(facts.precondition, PRECONDITIONS) &&
    (rejection === null || isRejection(rejection)) &&
    isAmount(rulesOf(facts));
  if (!isProposal) throw new Malformed("not the payload of a proposal");
  return { facts, commitment: facts.commitment, precondition: facts.precondition, rejection, rules: rulesOf(facts) };
}

/** The version of the rules with which a tenant starts whose first entry this is. */
function rulesOf(facts) {
  return facts.rules === undefined ? RULES_BEFORE_VERSIONS : facts.rules;
}

/** Throws where the rules that are in force are newer than this page. */
export function checkKnown(rules) {
  if (rules <= RULES_NEWEST) return rules;
  throw new Malformed(`it is judged by rules ${rules}, and this program knows rules up to ${RULES_NEWEST}`);
}

/** Node and capacity that a payload sets. */
export function readCapacity(payload) {
  const facts = parseJson(payload, "the payload");
  const isCapacity =
    isObject(facts) &&
    isText(facts.node) &&
    isResources(facts.capacity) &&
    (facts.overcommit === undefined || facts.overcommit === null || isOvercommit(facts.overcommit)) &&
    isAmount(rulesOf(facts));
  if (!isCapacity) throw new Malformed("not the payload of a capacity");
  return { node: facts.node, capacity: facts.capacity, overcommit: facts.overcommit ?? null, rules: rulesOf(facts) };
}

/** The state of the commitments that a PRUNED entry about entries up to ``toSeq`` carries (ledger/machines/carried.py). */
export function readCarried(said, toSeq) {
  const isActive = (each) => isObject(each) && isIndex(each.index) && isKind(each.commitment, COMMITMENTS);
  const isNode = (each) =>
    isObject(each) &&
    isIndex(each.index) &&
    isText(each.node) &&
    isResources(each.capacity) &&
    (each.overcommit === undefined || each.overcommit === null || isOvercommit(each.overcommit));
  const isRules = isAmount(said.rules) && said.rules >= 1 && said.rules <= RULES_NEWEST;
  if (!isRules || !isList(isActive)(said.active) || !isList(isNode)(said.nodes)) throw new Malformed(NO_STATE);
  const { active, nodes } = said;
  const indexes = [...active, ...nodes].map(({ index }) => index);
  const isOneState =
    isAscending(active, toSeq) &&
    isAscending(nodes, toSeq) &&
    new Set(indexes).size === indexes.length &&
    new Set(nodes.map(({ node }) => node)).size === nodes.length &&
    active.every(({ commitment }) => commitment.kind !== "Revocation");
  if (!isOneState) throw new Malformed(NO_STATE);
  return said;
}

const NO_STATE = "it carries no state of the commitments";
const isIndex = (value) => isInteger(value, 1);

function isAscending(items, last) {
  return items.every(({ index }, at) => index < (items[at + 1]?.index ?? last + 1));
}

/** Each dimension that is not 0, with its amount; accelerators one by one, in the order of canonical JSON. */
export function amountsOf(resources) {
  const plain = AMOUNTS.map((name) => [name, resources[name] ?? 0]);
  const accelerators = resources[ANY_ACCELERATOR] ?? {};
  const each = Object.keys(accelerators)
    .sort()
    .map((name) => [`${ANY_ACCELERATOR}.${name}`, accelerators[name]]);
  return [...plain, ...each].filter(([, amount]) => amount > 0);
}

export function amountOf(resources, dimension) {
  return inDimension(resources, dimension) ?? 0;
}

function inDimension(resources, dimension) {
  const prefix = `${ANY_ACCELERATOR}.`;
  if (!dimension.startsWith(prefix)) return resources[dimension];
  const name = dimension.slice(prefix.length);
  const each = resources[ANY_ACCELERATOR] ?? {};
  return Object.hasOwn(each, name) ? each[name] : undefined;
}

/** The most that may be reserved of ``amount``, rounded down. */
export function limitOf(overcommit, dimension, amount) {
  const [whole, decimals = ""] = (inDimension(overcommit, dimension) ?? "1").split(".");
  return (amount * BigInt(whole + decimals.padEnd(3, "0"))) / 1000n;
}

/** What entries about a commitment are known by. */
export function subjectOf(commitment) {
  switch (commitment.kind) {
    case "GangPlacement":
      return `gang:${commitment.gang}`;
    case "ModuleAdjustment":
      return moduleSubject(commitment);
    case "QuotaGrant":
      return `quota:${commitment.subject}`;
    case "Lease":
      return `lease:${commitment.resource}`;
    case "Revocation":
      return `index:${commitment.index}`;
    case "RulesVersion":
      return "rules:commitments";
    default:
      return `capsule:${commitment.capsule}`;
  }
}

export function moduleSubject({ mission, module }) {
  return `module:${mission}/${module}`;
}

export function nodeSubject(node) {
  return `node:${node}`;
}
