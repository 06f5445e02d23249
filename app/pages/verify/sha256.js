// SHA-256 (FIPS 180-4), incremental. The one hash that is computed here and not by WebCrypto: that takes whole buffers
// only, while a bundle may be larger than memory, and one promise for each of the few small hashes of every entry.
// ``selfTest`` holds it against WebCrypto before anything is judged.

export const DIGEST_BYTES = 32;

const BLOCK_BYTES = 64;

const K = new Int32Array([
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
  0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
  0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
  0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
  0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
  0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
  0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
  0xc67178f2,
]);

const INITIAL = new Int32Array([
  0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
]);

export class Sha256 {
  constructor() {
    this.state = new Int32Array(8);
    this.schedule = new Int32Array(64);
    this.block = new Uint8Array(BLOCK_BYTES);
    this.reset();
  }

  reset() {
    this.state.set(INITIAL);
    this.filled = 0;
    this.bytes = 0;
    return this;
  }

  update(data) {
    let at = 0;
    this.bytes += data.length;
    if (this.filled) {
      const taken = Math.min(BLOCK_BYTES - this.filled, data.length);
      this.block.set(data.subarray(0, taken), this.filled);
      this.filled += taken;
      at = taken;
      if (this.filled < BLOCK_BYTES) return this;
      this.#compress(this.block, 0);
      this.filled = 0;
    }
    for (; at + BLOCK_BYTES <= data.length; at += BLOCK_BYTES) this.#compress(data, at);
    if (at < data.length) {
      this.block.set(data.subarray(at));
      this.filled = data.length - at;
    }
    return this;
  }

  /** The 32 bytes; nothing can be added afterwards but by ``reset``. */
  digest() {
    const { block, bytes } = this;
    block[this.filled++] = 0x80;
    if (this.filled > BLOCK_BYTES - 8) {
      block.fill(0, this.filled);
      this.#compress(block, 0);
      this.filled = 0;
    }
    block.fill(0, this.filled, BLOCK_BYTES - 8);
    putWord(block, BLOCK_BYTES - 8, Math.floor(bytes / 0x20000000));
    putWord(block, BLOCK_BYTES - 4, bytes << 3);
    this.#compress(block, 0);
    const result = new Uint8Array(DIGEST_BYTES);
    for (let at = 0; at < 8; at++) putWord(result, 4 * at, this.state[at]);
    return result;
  }

  #compress(data, at) {
    const w = this.schedule;
    const s = this.state;
    for (let i = 0; i < 16; i++, at += 4) {
      w[i] = (data[at] << 24) | (data[at + 1] << 16) | (data[at + 2] << 8) | data[at + 3];
    }
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15];
      const y = w[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
    }
    let a = s[0];
    let b = s[1];
    let c = s[2];
    let d = s[3];
    let e = s[4];
    let f = s[5];
    let g = s[6];
    let h = s[7];
    for (let i = 0; i < 64; i++) {
      const big1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + big1 + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const big0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (big0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + t1) | 0;
      d = c;
      c = b;
      b = a;
      a = (t1 + t2) | 0;
    }
    s[0] += a;
    s[1] += b;
    s[2] += c;
    s[3] += d;
    s[4] += e;
    s[5] += f;
    s[6] += g;
    s[7] += h;
  }
}

/** 32 bits, the highest first. */
function putWord(bytes, at, word) {
  bytes[at] = word >>> 24;
  bytes[at + 1] = word >>> 16;
  bytes[at + 2] = word >>> 8;
  bytes[at + 3] = word;
}

const shared = new Sha256();

/** The digest of all these bytes, one behind the other. */
export function sha256(...pieces) {
  shared.reset();
  for (const piece of pieces) shared.update(piece);
  return shared.digest();
}

const SELF_TEST_LENGTHS = [0, 1, 31, 55, 56, 63, 64, 65, 119, 120, 128, 1000, 65537];

/** Whether it agrees with WebCrypto on texts of every kind of length. */
export async function selfTest() {
  for (const length of SELF_TEST_LENGTHS) {
    const data = Uint8Array.from({ length }, (_, index) => (index * 151 + length) & 255);
    const expected = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
    const pieces = new Sha256().update(data.subarray(0, length >> 1)).update(data.subarray(length >> 1));
    const found = [sha256(data), pieces.digest()];
    if (found.some((each) => each.some((byte, index) => byte !== expected[index]))) return false;
  }
  return true;
}
