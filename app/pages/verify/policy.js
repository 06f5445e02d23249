// Policies over witnesses (docs/formats/policy.md): which must have cosigned a log, and how far they did.

import { Malformed, quoted } from "./encoding.js";
import { VerifierKey, noteSignersOf, parseNote } from "./note.js";

const CHARACTERS_MAX = 256 * 1024;
const LOGS_MAX = 1000;
const WITNESSES_MAX = 32;
const GROUPS_MAX = 100;
const NONE = "none";
const URL_FORM = /^https?:\/\/[!-?A-~]{1,2000}$/;
const NUMBER = /^[1-9][0-9]{0,2}$/;

export class Policy {
  constructor() {
    this.logs = [];
    this.witnesses = new Map();
    this.groups = new Map();
    this.quorum = null;
  }

  static parse(text) {
    if (text.length > CHARACTERS_MAX) throw new Malformed(`a policy is longer than ${CHARACTERS_MAX} characters`);
    const policy = new Policy();
    text.split("\n").forEach((line, at) => {
      const [item, ...words] = line.match(/[^ \t]+/g) ?? ["#"];
      if (item.startsWith("#")) return;
      try {
        policy.#add(item, words);
      } catch (error) {
        if (!(error instanceof Malformed)) throw error;
        throw new Malformed(`line ${at + 1} of the policy: ${error.message}`);
      }
    });
    if (policy.quorum === null) throw new Malformed("the policy has no line quorum");
    return policy;
  }

  /** The keys of its witnesses. */
  get keys() {
    return [...this.witnesses.values()];
  }

  /** Throws unless one of the logs that the policy names, if it names any, signed the note of a checkpoint. */
  async requireNamedLog(content, origin) {
    if (!this.logs.length) return;
    const named = this.logs.filter(({ name }) => name === origin);
    await noteSignersOf(parseNote(content), named);
  }

  /**
   * How far the quorum covers the log, and whether that is up to entry ``toSeq``. ``sizes`` has by verifier key the
   * largest tree that a witness cosigned and that is one of this log.
   */
  judge(sizes, toSeq) {
    if (this.quorum === NONE) return { met: true, quorum: NONE, quorum_to_seq: toSeq, missing: [] };
    const reached = new Map([...this.witnesses].map(([name, key]) => [name, sizes.get(key.text) ?? 0]));
    for (const [name, { threshold, members }] of this.groups) {
      const ordered = members.map((member) => reached.get(member)).sort((one, other) => other - one);
      reached.set(name, ordered[threshold - 1]);
    }
    const size = reached.get(this.quorum);
    const met = size >= toSeq;
    const behind = met ? [] : this.#underQuorum().filter((name) => reached.get(name) < toSeq);
    const missing = behind.map((name) => {
      const has = reached.get(name);
      return `${name}: has cosigned ${has ? `${has} of ${toSeq} entries` : "nothing of this log"}`;
    });
    return { met, quorum: this.quorum, quorum_to_seq: Math.min(size, toSeq), missing };
  }

  #underQuorum() {
    const wanted = new Set([this.quorum]);
    for (const [name, { members }] of [...this.groups].reverse()) {
      if (wanted.has(name)) members.forEach((member) => wanted.add(member));
    }
    return [...this.witnesses.keys()].filter((name) => wanted.has(name));
  }

  #isDefined(name) {
    return this.witnesses.has(name) || this.groups.has(name);
  }

  #define(name) {
    need(name !== NONE, "none is not a name");
    need(!this.#isDefined(name), `${quoted(name)} is defined already`);
  }

  #add(item, words) {
    if (item === "log") this.#addLog(words);
    else if (item === "witness") this.#addWitness(words);
    else if (item === "group") this.#addGroup(words);
    else if (item === "quorum") this.#setQuorum(words);
    else throw new Malformed(`${quoted(item, 40)} is not log, witness, group or quorum`);
  }

  #addLog(words) {
    need(words.length === 1 || words.length === 2, "what follows must be a verifier key, and perhaps a URL");
    need(this.logs.length < LOGS_MAX, `there are more than ${LOGS_MAX} logs`);
    this.logs.push(VerifierKey.parse(words[0]));
  }

  #addWitness(words) {
    need(
      words.length === 2 || words.length === 3,
      "what follows must be a name, a verifier key, and perhaps a URL",
    );
    const [name, text, url] = words;
    const key = VerifierKey.parse(text, { isWitness: true });
    need(this.witnesses.size < WITNESSES_MAX, `there are more than ${WITNESSES_MAX} witnesses`);
    need(url === undefined || URL_FORM.test(url), "the URL is not one of http:// or https:// without a user");
    need(
      !this.keys.some(({ publicKey }) => publicKey.id === key.publicKey.id),
      `the key of ${name} is that of another witness, which would count twice`,
    );
    this.#define(name);
    this.witnesses.set(name, key);
  }

  #addGroup(words) {
    need(words.length >= 3, "what follows must be a name, any, all or a number, and members");
    const [name, threshold, ...members] = words;
    const used = new Set([...this.groups.values()].flatMap((group) => group.members));
    need(this.groups.size < GROUPS_MAX, `there are more than ${GROUPS_MAX} groups`);
    need(
      members.every((member) => this.#isDefined(member)),
      "a member is not defined above",
    );
    need(
      new Set(members).size === members.length && !members.some((member) => used.has(member)),
      "a member is one of a group already, and would count twice",
    );
    const number = { any: "1", all: String(members.length) }[threshold] ?? threshold;
    need(
      NUMBER.test(number) && Number(number) <= members.length,
      `the threshold is not any, all or a number from 1 to ${members.length}`,
    );
    this.#define(name);
    this.groups.set(name, { threshold: Number(number), members });
  }

  #setQuorum(words) {
    need(words.length === 1, "what follows must be a name, or none");
    need(this.quorum === null, "there is a line quorum already");
    need(words[0] === NONE || this.#isDefined(words[0]), `${quoted(words[0])} is not defined above`);
    [this.quorum] = words;
  }
}

/**
 * A verdict with how far the quorum of a policy covers the log up to ``toSeq``, by the judged anchors; as it is without a
 * policy.
 */
export function withQuorum(verdict, anchors, policy, toSeq = verdict.to_seq) {
  if (policy === null) return verdict;
  const sizes = new Map();
  for (const { key, status, to_seq: size } of anchors) {
    if (status === "ok") sizes.set(key, Math.max(size, sizes.get(key) ?? 0));
  }
  return { ...verdict, policy: policy.judge(sizes, toSeq) };
}

function need(holds, why) {
  if (!holds) throw new Malformed(why);
}
