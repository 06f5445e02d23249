// The Merkle tree over chain links (RFC 9162 section 2.1, docs/formats/merkle.md).

import { sameBytes, toHex } from "./encoding.js";
import { DIGEST_BYTES, sha256 } from "./sha256.js";

/** What was to be proved is not. */
export class ProofError extends Error {}

const LEAF = Uint8Array.of(0);
const NODE = Uint8Array.of(1);

export function leafHash(link) {
  return sha256(LEAF, link);
}

export function nodeHash(left, right) {
  return sha256(NODE, left, right);
}

/** The right edge of a tree that grows: the roots of its perfect subtrees, by level. */
export class Frontier {
  constructor() {
    this.size = 0;
    this.byLevel = [];
  }

  /** The edge of a tree of this size, from its hashes, the largest first; null where there are more or fewer. */
  static restore(size, hashes) {
    const frontier = new Frontier();
    frontier.size = size;
    const fromSmall = [...hashes].reverse();
    // Sizes go beyond the 32 bits that operators on numbers take.
    for (let rest = BigInt(size); rest; rest >>= 1n) frontier.byLevel.push(rest & 1n ? (fromSmall.shift() ?? null) : null);
    const needed = BigInt(size).toString(2).replaceAll("0", "").length;
    return hashes.length === needed ? frontier : null;
  }

  append(leaf) {
    let level = 0;
    let root = leaf;
    for (; this.byLevel[level]; level++) {
      root = nodeHash(this.byLevel[level], root);
      this.byLevel[level] = null;
    }
    this.byLevel[level] = root;
    this.size++;
  }

  root() {
    let root = null;
    for (const each of this.byLevel) {
      if (each) root = root ? nodeHash(each, root) : each;
    }
    return root ?? sha256();
  }
}

/** The root to which ``hashes``, from the leaf's sibling up, lead (2.1.3.2); throws where there is no such leaf. */
export function rootOfPath(leafIndex, treeSize, leaf, hashes) {
  refuseMalformed([leaf, ...hashes]);
  if (!(leafIndex >= 0 && leafIndex < treeSize)) {
    throw new ProofError(`leaf index ${leafIndex} is not in a tree of size ${treeSize}`);
  }
  const [inner, border] = proofLengths(BigInt(leafIndex), BigInt(treeSize));
  if (hashes.length !== inner + border) {
    throw new ProofError(`an inclusion proof has ${hashes.length} hashes here, ${inner + border} needed`);
  }
  return climbBorder(climb(leaf, hashes.slice(0, inner), BigInt(leafIndex)), hashes.slice(inner));
}

/** Throws unless the leaf is in the tree of this root. */
export function verifyInclusion(leafIndex, treeSize, leaf, hashes, root) {
  refuseMalformed([root]);
  if (!sameBytes(rootOfPath(leafIndex, treeSize, leaf, hashes), root)) {
    throw new ProofError(`the proof of leaf ${leafIndex} does not lead to the root ${toHex(root)}`);
  }
}

/** Throws unless the tree of size ``first`` is the beginning of that of size ``second`` (2.1.4.2). */
export function verifyConsistency(first, second, firstRoot, secondRoot, hashes) {
  refuseMalformed([firstRoot, secondRoot, ...hashes]);
  if (!(first >= 1 && first <= second)) {
    throw new ProofError(`sizes ${first} and ${second} are not 1 <= first <= second`);
  }
  if (first === second) {
    if (hashes.length) throw new ProofError("trees of one size need no hashes, the proof has some");
    if (!sameBytes(firstRoot, secondRoot)) throw new ProofError(`there are two roots for the size ${first}`);
    return;
  }
  // The proof is an inclusion proof of the first tree's last perfect subtree in the second tree, after that subtree's
  // own root, which is left out when it is the whole first tree.
  const size = BigInt(first);
  const height = bitLength(size & -size) - 1;
  const [fullInner, border] = proofLengths(size - 1n, BigInt(second));
  const inner = fullInner - height;
  const isSeedGiven = size !== 1n << BigInt(height);
  const needed = Number(isSeedGiven) + inner + border;
  if (hashes.length !== needed) {
    throw new ProofError(`a consistency proof has ${hashes.length} hashes here, ${needed} needed`);
  }
  const [seed, path] = isSeedGiven ? [hashes[0], hashes.slice(1)] : [firstRoot, hashes];
  const index = (size - 1n) >> BigInt(height);
  const below = path.slice(0, inner);
  const beyond = path.slice(inner);
  const lefts = below.filter((_, level) => isRight(index, level));
  if (!sameBytes(climbBorder(seed, [...lefts, ...beyond]), firstRoot)) {
    throw new ProofError(`the proof does not lead to the root ${toHex(firstRoot)} of size ${first}`);
  }
  if (!sameBytes(climbBorder(climb(seed, below, index), beyond), secondRoot)) {
    throw new ProofError(`the proof does not lead to the root ${toHex(secondRoot)} of size ${second}`);
  }
}

function refuseMalformed(hashes) {
  if (hashes.some((each) => !(each instanceof Uint8Array) || each.length !== DIGEST_BYTES)) {
    throw new ProofError(`a hash of the proof is not ${DIGEST_BYTES} bytes`);
  }
}

/** Hashes of an inclusion proof below and above where the paths to ``index`` and to the last leaf part. */
function proofLengths(index, size) {
  const inner = bitLength(index ^ (size - 1n));
  const border = (index >> BigInt(inner)).toString(2).replaceAll("0", "").length;
  return [inner, border];
}

function bitLength(number) {
  return number === 0n ? 0 : number.toString(2).length;
}

function isRight(index, level) {
  return ((index >> BigInt(level)) & 1n) === 1n;
}

function climb(seed, hashes, index) {
  return hashes.reduce(
    (root, sibling, level) => (isRight(index, level) ? nodeHash(sibling, root) : nodeHash(root, sibling)),
    seed,
  );
}

function climbBorder(seed, hashes) {
  return hashes.reduce((root, sibling) => nodeHash(sibling, root), seed);
}
