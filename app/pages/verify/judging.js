// Judging a bundle: what signing/judging.py and ledger/verification do, in their words, by keys that the reader
// brings. Steps, those of docs/formats/bundle.md:
//
//     1. container, digests and the manifest's signature
//     2. the checkpoints: the bundle's own, and the one that the reader kept
//     3. entries, snapshots and tree, in one pass
//     4. statements of external witnesses about the log
//
// Where 1 or 2 is broken nothing else is looked at.

import { judgeAnchors, parseAnchors } from "./anchors.js";
import { Bundle } from "./bundle.js";
import { BundleInvalid, digestOf } from "./container.js";
import { CallerChecker } from "./callers.js";
import { CommitmentJudge, isOfCommitments } from "./commitments.js";
import { Malformed, fromHex, quoted, sameBytes, toHex } from "./encoding.js";
import { EntryChecker } from "./entries.js";
import { ASPECTS, Findings } from "./findings.js";
import { floorOf, shownFloor } from "./floor.js";
import { ManifestForged } from "./manifest.js";
import { JobIndex } from "./job_index.js";
import { indexBehind } from "./kept_index.js";
import { Frontier, ProofError, leafHash, verifyConsistency } from "./merkle.js";
import { judgeCheckpoint, judgeKept, otherSignatures, readCheckpoint } from "./note.js";
import { withQuorum } from "./policy.js";
import { SnapshotJudge, isNext, openRow } from "./snapshots.js";
import { KEPT, OWN, breakOf, isValid, rollbackAt, withBreak, withCheckpoint } from "./verdicts.js";

const RANGE_ENTRIES = 8192;
const CHAIN_ASPECTS = ["links", "payloads", "head"];

/**
 * The verdict on a file, whatever it holds, and the bundle where it could be opened.
 *
 * @param {Blob} file
 * @param {{keyring: ?Keyring, kept: ?string, witnesses: VerifierKey[], policy: ?Policy}} against what the reader
 *     brings.
 * @param {{onProgress: Function, onRow: Function}} told
 */
export async function judgeBundle(file, against, { onProgress = () => {}, onRow = () => {} } = {}) {
  let bundle = null;
  let kept = null;
  if (against.kept !== null) {
    try {
      kept = await judgeKept(against.kept, against.keyring);
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      const why = `the checkpoint that was given does not hold: ${error.message}`;
      const about = { sha256: await digestOf(file), bytes: file.size };
      return { verdict: brokenVerdict("checkpoint", "checkpoint-given", why, null, about), bundle: null };
    }
  }
  let judging = null;
  try {
    bundle = await Bundle.open(file, against.keyring, (bytes) => onProgress("Reading the file", bytes, file.size));
    judging = new Judging(bundle, { ...against, kept });
    return { verdict: await judging.verdict({ onProgress, onRow }), bundle };
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    const kind = error instanceof ManifestForged ? "bundle-signature" : "bundle";
    const sha256 = bundle?.digest ?? (await digestOf(file));
    const about = judging?.about() ?? { sha256, bytes: file.size };
    return { verdict: brokenVerdict("bundle", kind, error.message, bundle?.manifest, about), bundle: null };
  }
}

/** What a bundle says of itself, judged by what the reader brings. */
class Judging {
  constructor(bundle, { keyring, kept, witnesses, policy }) {
    Object.assign(this, { bundle, manifest: bundle.manifest, keyring, kept, witnesses, policy });
    this.findings = new Findings();
    this.snapshotKeys = new Map();
    this.own = null;
  }

  async verdict(told) {
    // 2. The checkpoints.
    this.own = await this.#ownCheckpoint();
    const [heads, untold] = this.#heads();
    const anchorBytes = await this.bundle.anchors();
    const anchors = anchorBytes === null ? [] : parseAnchors(anchorBytes);
    // 3. The rows.
    const floor = await floorOf(this.bundle, this.keyring, this.findings);
    const kept = floor === null ? null : await this.bundle.jobIndex();
    const chain = new Chain(this, heads, floor, kept);
    const found = await chain.verdict(told);
    const undecided = untold ?? this.#belowFloor(floor);
    // 4. All of it together.
    let verdict = this.#withKept(found);
    verdict = this.#withAnchors(verdict, await judgeAnchors(anchors, this.own.checkpoint, this));
    verdict = this.#withManifest(verdict);
    verdict = this.#withCheckpoints(verdict, undecided);
    return { ...verdict, not_checked: this.#leftOut(verdict, undecided), bundle: this.about() };
  }

  async #ownCheckpoint() {
    const { manifest } = this;
    try {
      const content = await this.bundle.checkpoint();
      const checkpoint = readCheckpoint(content);
      if (checkpoint.origin !== manifest.origin) {
        throw new Malformed(`it is of log ${quoted(checkpoint.origin)}, not of ${quoted(manifest.origin)}`);
      }
      const judged = await judgeCheckpoint(content, this.keyring);
      const proof = manifest.consistency.map(fromHex);
      verifyConsistency(manifest.tree_size, checkpoint.size, fromHex(manifest.tree_root), checkpoint.root, proof);
      return judged;
    } catch (error) {
      if (error instanceof ProofError) {
        const why = `the bundle's checkpoint is not of a log that begins with its entries: ${error.message}`;
        throw new BundleInvalid(why);
      }
      if (!(error instanceof Malformed) || error instanceof BundleInvalid) throw error;
      throw new BundleInvalid(`the bundle's checkpoint does not hold: ${error.message}`);
    }
  }

  /** The tree heads that the entries can be compared with, and why the kept one cannot. */
  #heads() {
    const { manifest, own, kept } = this;
    const heads = [];
    if (own.unknown === null) {
      heads.push({ size: manifest.tree_size, root: manifest.tree_root, source: OWN, isOwn: true });
    }
    if (kept === null || kept.unknown !== null) return [heads, null];
    const { origin, size, root } = kept.checkpoint;
    if (origin !== manifest.origin) {
      return [heads, `the checkpoint given is of log ${quoted(origin)}, the bundle of ${quoted(manifest.origin)}`];
    }
    if (size === own.checkpoint.size && size > manifest.to_seq) return [heads, null];
    if (manifest.to_seq < size && size < own.checkpoint.size) {
      return [heads, `the checkpoint given covers ${size} entries, the bundle ends at seq ${manifest.to_seq}`];
    }
    heads.push({ size, root: toHex(root), source: KEPT, isOwn: false });
    return [heads, null];
  }

  /** Why a kept checkpoint of entries that left cannot be compared; null where it can. */
  #belowFloor(floor) {
    const { kept } = this;
    if (kept === null || kept.unknown !== null || floor === null || kept.checkpoint.size >= floor.toSeq) return null;
    return `the checkpoint given covers ${kept.checkpoint.size} entries, and those up to ${floor.toSeq} have left`;
  }

  /** Compares the kept checkpoint with the bundle's own of the same size, unless the entries themselves were. */
  #withKept(verdict) {
    const { own, kept } = this;
    if (kept === null || kept.unknown !== null || (verdict.compared_with ?? "").split(", ").includes(KEPT))
      return verdict;
    const { origin, size, root } = kept.checkpoint;
    if (origin !== own.checkpoint.origin || size !== own.checkpoint.size) return verdict;
    if (sameBytes(root, own.checkpoint.root)) return withCheckpoint(verdict, "ok");
    const detail = `the checkpoint that came along is not that of ${KEPT}, of the same ${size} entries`;
    const rollback = rollbackAt(size, detail, toHex(root), toHex(own.checkpoint.root));
    return withBreak(withCheckpoint(verdict, "broken"), rollback);
  }

  #withAnchors(verdict, anchors) {
    const own = this.own.checkpoint;
    for (const { status, detail, said } of anchors) {
      if (status === "broken") {
        const actual = own.size === said.size ? toHex(own.root) : null;
        verdict = withBreak(verdict, rollbackAt(said.size, detail, said.root, actual));
      }
    }
    const told = anchors.map(({ said, key, ...each }) => each);
    return withQuorum({ ...verdict, anchors: told }, anchors, this.policy);
  }

  #withManifest(verdict) {
    const { signed } = this.bundle;
    const verdicts = { bundle: signed.verdict, ...verdict.verdicts };
    if (signed.verdict !== "unknown_key") return { ...verdict, verdicts };
    const why = breakOf("bundle-signature", `the manifest's signature: ${signed.detail}`);
    return { ...verdict, verdicts, valid: false, first_break: verdict.first_break ?? why };
  }

  #withCheckpoints(verdict, undecided) {
    const verdicts = { ...verdict.verdicts };
    const found = { ...verdict, verdicts, not_compared: undecided === null ? [] : [KEPT] };
    if (verdicts.checkpoint === "broken") return found;
    if (this.own.unknown !== null || (this.kept !== null && this.kept.unknown !== null)) {
      verdicts.checkpoint = "unknown_key";
      found.valid = false;
    } else if (this.keyring === null || undecided !== null) {
      verdicts.checkpoint = "not_checked";
    }
    return found;
  }

  /** What could not be checked, and why, in words. */
  #leftOut(verdict, undecided) {
    const { from_seq: fromSeq, verified_from_seq: firstSeq, unsigned_entries: unsigned, commitments } = verdict;
    const left = [];
    if (this.keyring === null) {
      left.push("no key was given, so no signature was checked: the author of the file may have invented all of it");
    }
    if (fromSeq > firstSeq) {
      left.push(`the range begins at seq ${fromSeq}: what came before, and the tree over all of it, is not here`);
    }
    if (unsigned > 0) {
      left.push(`no signed snapshot covers the last ${unsigned} entries, from seq ${verdict.signed_to_seq + 1} on`);
    }
    if (this.own.unknown !== null) left.push(`the checkpoint inside: ${this.own.unknown}`);
    if (this.kept === null) {
      left.push("no checkpoint kept elsewhere was given: that the log was longer once would not be seen");
    } else if (this.kept.unknown !== null) {
      left.push(`the checkpoint given: ${this.kept.unknown}`);
    }
    if (undecided !== null) left.push(undecided);
    if (fromSeq > firstSeq && commitments) {
      left.push("verdicts on proposals: each hangs on all entries before it, and not all are here");
    }
    left.push("job states: bundles hold none, they follow from the entries");
    return left;
  }

  /** What was judged, as far as it was read. */
  about() {
    const { bundle, manifest, own } = this;
    return {
      sha256: bundle.digest,
      bytes: bundle.bytes,
      node_id: manifest.node_id,
      log_origin: manifest.log_origin,
      tenant_id: manifest.tenant_id,
      from_seq: manifest.from_seq,
      to_seq: manifest.to_seq,
      first_hlc: manifest.first_hlc,
      last_hlc: manifest.last_hlc,
      entry_count: manifest.entry_count,
      snapshot_count: manifest.snapshot_count,
      tree_size: manifest.tree_size,
      tree_root: manifest.tree_root,
      ...(own && aboutCheckpoint(own)),
      manifest_key_ids: bundle.signed.keyIds,
      snapshot_key_ids: [...this.snapshotKeys.keys()].sort(),
      snapshots_by_key: Object.fromEntries(this.snapshotKeys),
    };
  }
}

function aboutCheckpoint({ checkpoint, signers }) {
  return {
    checkpoint: { origin: checkpoint.origin, size: checkpoint.size, root: toHex(checkpoint.root) },
    checkpoint_key_ids: signers.map(({ publicKey }) => publicKey.id),
    checkpoint_other_signatures: otherSignatures(checkpoint),
  };
}

/** The entries, snapshots and tree of a bundle, in one pass. */
class Chain {
  constructor({ bundle, manifest, keyring, findings, snapshotKeys }, heads, floor, kept) {
    Object.assign(this, { bundle, manifest, keyring, findings, snapshotKeys, heads, floor });
    const firstSeq = manifest.from_seq;
    this.isFromStart = firstSeq === 1 || floor !== null;
    const prevLink = firstSeq === 1 ? null : floor?.link;
    this.callers = new CallerChecker(manifest.tenant_id, findings, keyring);
    this.checker = new EntryChecker(findings, firstSeq, prevLink);
    this.judge = new SnapshotJudge(manifest.tenant_id, findings, firstSeq, floor?.snapshot ?? null, this.isFromStart);
    this.rows = bundle.snapshotRows();
    this.waiting = [];
    this.isLastRead = false;
    this.readTo = -1;
    this.plannedTo = firstSeq - 1;
    this.highestSeq = 0;
    this.covering = null;
    this.tree = floor?.tree ?? new Frontier();
    this.jobIndex = floor === null ? new JobIndex(firstSeq - 1) : indexBehind(floor, kept);
    this.roots = new Map(floor === null ? [] : [[floor.toSeq, toHex(floor.tree.root())]]);
    this.sizes = new Set([manifest.tree_size, ...heads.map((head) => head.size)]);
    this.passedSeq = firstSeq - 1;
    this.rangeEnd = rangeEndOf(firstSeq);
    this.commitments = 0;
    // They count in a whole chain alone: entries that are missing or edited give other verdicts.
    this.candidates = new Findings();
    this.commitmentJudge = new CommitmentJudge((...said) => this.candidates.add("projection", ...said), floor);
  }

  async verdict({ onProgress, onRow }) {
    const { bundle, manifest, findings } = this;
    findings.begin("links", "payloads", "snapshots");
    if (this.isFromStart) findings.begin("tree");
    const last = await bundle.lastEntry();
    let read = 0;
    for await (const { number, rows } of bundle.parts()) {
      const inRange = manifest.from_seq > 1 ? rows.filter((row) => row.seq >= manifest.from_seq) : rows;
      await this.#openUpTo(inRange.reduce((most, row) => Math.max(most, row.seq), 0));
      for (const row of inRange) {
        this.#take(row);
        await this.callers.check(row);
        onRow(row);
      }
      read += manifest.entryParts[number].bytes;
      onProgress("Checking the entries", read, bundle.bytes);
    }
    await this.#openUpTo(Infinity);
    this.#judgeSnapshots(Infinity);
    const comparedWith = this.#compareHeads(last.seq);
    this.#checkHead(last);
    this.#concludeCommitments();
    return this.#told(last, comparedWith);
  }

  #take(row) {
    if (row.seq > this.rangeEnd) {
      this.#judgeSnapshots(this.passedSeq);
      this.rangeEnd = rangeEndOf(row.seq);
    }
    if (isOfCommitments(row)) {
      this.commitments++;
      if (this.isFromStart) this.commitmentJudge.take(row);
    }
    const link = this.checker.check(row);
    if (link === null) return;
    const leaf = leafHash(link);
    this.passedSeq = row.seq;
    if (row.seq !== this.jobIndex.size + 1) this.jobIndex = new JobIndex(row.seq - 1);
    this.jobIndex.append(row.job_id, leaf);
    if (row.seq === this.tree.size + 1) {
      this.tree.append(leaf);
      if (this.sizes.has(row.seq)) this.roots.set(row.seq, toHex(this.tree.root()));
    }
    this.#cover(row, toHex(link), leaf);
  }

  // --- snapshots --------------------------------------------------------------------------------

  /** Opens the snapshots that begin up to ``seq``, so that what they cover can be computed as it passes. */
  async #openUpTo(seq) {
    while (!this.isLastRead && this.readTo <= seq) {
      const { done, value: row } = await this.rows.next();
      this.isLastRead = done;
      if (done) return;
      this.readTo = row.from_seq;
      const snapshot = await openRow(row, this.keyring, this.findings);
      if (snapshot.keyId) this.snapshotKeys.set(snapshot.keyId, (this.snapshotKeys.get(snapshot.keyId) ?? 0) + 1);
      snapshot.isCompared = isNext(snapshot, this.plannedTo);
      if (snapshot.isCompared) this.plannedTo = snapshot.toSeq;
      this.highestSeq = Math.max(this.highestSeq, snapshot.storedTo);
      this.sizes.add(snapshot.toSeq);
      this.waiting.push(snapshot);
    }
  }

  /** Adds an entry to what the snapshot that covers it is compared with. */
  #cover(row, link, leaf) {
    const { seq } = row;
    this.covering ??= this.waiting.find((each) => each.isCompared && !each.computed && each.toSeq >= seq) ?? null;
    const snapshot = this.covering;
    if (snapshot === null || seq < snapshot.fromSeq) return;
    if (seq === snapshot.fromSeq) {
      snapshot.tree = new Frontier();
      snapshot.fromLink = link;
    }
    if (snapshot.tree && seq === snapshot.fromSeq + snapshot.tree.size) snapshot.tree.append(leaf);
    if (seq < snapshot.toSeq) return;
    const isWhole = seq === snapshot.toSeq && snapshot.tree?.size === snapshot.toSeq - snapshot.fromSeq + 1;
    if (isWhole) {
      snapshot.computed = {
        from_chain_link: snapshot.fromLink,
        to_chain_link: link,
        snapshot_hlc: row.t_hlc,
        entry_count: snapshot.tree.size,
        merkle_root: toHex(snapshot.tree.root()),
        tree_root: this.roots.get(seq) ?? null,
        job_index: snapshot.claim?.job_index ? this.jobIndex.roots() : null,
      };
    }
    snapshot.tree = null;
    snapshot.isCompared = false;
    this.covering = null;
    if (seq > snapshot.toSeq) this.#cover(row, link, leaf);
  }

  /** Judges those whose entries have passed, in the order in which they are stored. */
  #judgeSnapshots(passedSeq) {
    while (this.waiting.length) {
      const [snapshot] = this.waiting;
      if (snapshot.toSeq > passedSeq && this.judge.isNext(snapshot)) return;
      this.waiting.shift();
      if (this.covering === snapshot) this.covering = null;
      this.judge.judge(snapshot, snapshot.computed ?? null);
    }
  }

  // --- the ends ---------------------------------------------------------------------------------

  /** Compares what others say of the tree with its roots; returns where they say it. */
  #compareHeads(lastSeq) {
    const { findings, manifest, roots } = this;
    const root = roots.get(manifest.tree_size);
    if (root === undefined) findings.leaveUndecided("tree");
    else if (root !== manifest.tree_root) {
      const said = { expected: root, actual: manifest.tree_root };
      this.#report("tree", manifest.tree_size, "the stored root is not that of the entries", said);
    }
    const compared = this.heads.filter((head) => this.#isCompared(head, lastSeq)).map((head) => head.source);
    return [...new Set(compared)].join(", ") || null;
  }

  #isCompared({ size, root, source, isOwn }, lastSeq) {
    const { findings } = this;
    const found = this.roots.get(size);
    const isCompared = found !== undefined || size > lastSeq;
    if (isCompared && !isOwn) findings.begin("checkpoint");
    if (found !== undefined) {
      if (found !== root) {
        const detail = `the first ${size} entries are not those of the checkpoint held by ${source}`;
        this.#report("rollback", size, detail, { expected: root, actual: found });
      }
    } else if (size > lastSeq) {
      const detail = `the checkpoint held by ${source} covers ${size} entries, there are ${lastSeq}`;
      findings.add("rollback", lastSeq + 1, detail, { expected: size, actual: lastSeq });
    } else if (size > 0 && !isOwn) {
      findings.leaveUndecided("checkpoint");
    }
    return isCompared;
  }

  #report(kind, seq, detail, said) {
    if (this.findings.isChainBrokenBy(seq)) this.findings.leaveUndecided(kind === "tree" ? "tree" : "checkpoint");
    else this.findings.add(kind, seq, detail, said);
  }

  /** Compares the manifest, which says where the chain ends, with its last entry. */
  #checkHead(last) {
    const { findings, manifest } = this;
    const reach = Math.max(this.highestSeq, manifest.to_seq);
    findings.begin("head");
    if (reach > last.seq) {
      const saidBy = manifest.to_seq === reach ? "the head says" : "a snapshot or the tree says";
      const detail = `entries from seq ${last.seq + 1} on are missing: ${saidBy} that there are ${reach}`;
      findings.add("tail-truncated", last.seq + 1, detail, { expected: reach, actual: last.seq });
    }
    if (manifest.to_seq < last.seq) {
      const detail = `the head stands at seq ${manifest.to_seq}, the chain goes on to ${last.seq}`;
      findings.add("head", last.seq, detail, { expected: last.seq, actual: manifest.to_seq });
    } else if (manifest.to_seq === last.seq && manifest.to_chain_link !== last.chain_link) {
      const said = { expected: last.chain_link, actual: manifest.to_chain_link };
      findings.add("head", last.seq, "the head does not name the link of the last entry", said);
    } else if (manifest.to_seq === last.seq && manifest.last_hlc !== last.t_hlc) {
      const said = { expected: last.t_hlc, actual: manifest.last_hlc };
      findings.add("head", last.seq, "the head does not name the HLC of the last entry", said);
    }
  }

  #concludeCommitments() {
    const { findings, candidates } = this;
    if (!this.isFromStart || this.commitments === 0) return;
    findings.begin("projection");
    if (!findings.has(...CHAIN_ASPECTS)) findings.merge(candidates);
    else if (candidates.counts.size) findings.leaveUndecided("projection");
  }

  #told(last, comparedWith) {
    const { checker, findings, judge, manifest } = this;
    const verdicts = findings.verdicts();
    if (judge.endsUnsigned && verdicts.signatures === "ok") verdicts.signatures = "not_checked";
    const toSeq = checker.nextSeq - 1;
    return {
      tenant_id: manifest.tenant_id,
      valid: isValid(verdicts),
      entries_checked: checker.count,
      from_seq: manifest.from_seq,
      to_seq: toSeq,
      verified_from_seq: this.floor === null ? 1 : this.floor.toSeq + 1,
      pruned: this.floor === null ? null : shownFloor(this.floor),
      head: { seq: last.seq, chain_link: last.chain_link, hlc: last.t_hlc },
      verdicts,
      first_break: findings.firstBreak(),
      breaks: findings.breaks(),
      compared_with: comparedWith,
      anchors: [],
      signed_to_seq: judge.signedToSeq,
      unsigned_entries: Math.max(0, toSeq - judge.signedToSeq),
      commitments: this.commitments,
    };
  }
}

function rangeEndOf(seq) {
  return Math.ceil(seq / RANGE_ENTRIES) * RANGE_ENTRIES;
}

function brokenVerdict(aspect, kind, detail, manifest, about) {
  return {
    tenant_id: manifest?.tenant_id ?? null,
    valid: false,
    entries_checked: 0,
    from_seq: manifest?.from_seq ?? 0,
    to_seq: manifest?.to_seq ?? 0,
    head: { seq: 0, chain_link: null, hlc: null },
    verdicts: Object.fromEntries(
      ["bundle", ...ASPECTS].map((each) => [each, each === aspect ? "broken" : "not_checked"]),
    ),
    first_break: breakOf(kind, detail),
    breaks: { [kind]: 1 },
    compared_with: null,
    not_compared: [],
    anchors: [],
    signed_to_seq: 0,
    unsigned_entries: 0,
    commitments: 0,
    not_checked: ["the rows: the bundle itself does not hold, so nothing in it says anything"],
    bundle: { manifest_key_ids: [], snapshot_key_ids: [], ...about },
  };
}
