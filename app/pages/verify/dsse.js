// DSSE envelopes (docs/formats/snapshot.md): a payload, its type, and signatures over both.

import { Malformed, fromBase64, quoted, toUtf8 } from "./encoding.js";
import { isObject, isText } from "./json.js";
import { UnknownKey } from "./keys.js";

export const PAYLOAD_TYPE = "application/vnd.in-toto+json";
export const PAYLOAD_BYTES_MAX = 16 << 20;

const SIGNATURES_MAX = 16;
const KEY_ID_CHARACTERS_MAX = 256;

/** A signature by a held key does not hold. */
export class Forged extends Malformed {}

/** The bytes that are signed. */
export function preAuthEncoding(payload, payloadType = PAYLOAD_TYPE) {
  const type = toUtf8(payloadType);
  const head = toUtf8(`DSSEv1 ${type.length} ${payloadType} ${payload.length} `);
  const message = new Uint8Array(head.length + payload.length);
  message.set(head);
  message.set(payload, head.length);
  return message;
}

/** The parts of an envelope, unverified; fields that DSSE does not name are ignored. */
export function parseEnvelope(envelope, payloadType = PAYLOAD_TYPE) {
  if (!isObject(envelope)) throw new Malformed("an envelope must be a JSON object");
  if (envelope.payloadType !== payloadType) throw new Malformed(`payloadType of the envelope is not ${payloadType}`);
  const payload = fromBase64(envelope.payload, "payload", { urlSafe: true });
  if (payload.length > PAYLOAD_BYTES_MAX) throw new Malformed(`payload is over ${PAYLOAD_BYTES_MAX} bytes`);
  const { signatures } = envelope;
  if (!Array.isArray(signatures) || signatures.length < 1 || signatures.length > SIGNATURES_MAX) {
    throw new Malformed(`signatures must be a list of 1 to ${SIGNATURES_MAX}`);
  }
  return { payload, signatures: signatures.map(parseSignature) };
}

function parseSignature(item) {
  if (!isObject(item)) throw new Malformed("a signature must be a JSON object");
  const keyId = item.keyid ?? "";
  if (!isText(keyId, KEY_ID_CHARACTERS_MAX)) {
    throw new Malformed(`keyid must be text of at most ${KEY_ID_CHARACTERS_MAX} characters`);
  }
  return { keyId, signature: fromBase64(item.sig, "sig", { urlSafe: true }) };
}

/** The keys of the ring that signed, at least one; their windows are not judged. One that is named must have signed. */
export async function signersOf({ payload, signatures }, keyring, payloadType = PAYLOAD_TYPE) {
  const message = preAuthEncoding(payload, payloadType);
  const signers = [];
  let isAnyTried = false;
  for (const { keyId, signature } of signatures) {
    const candidates = keyId === "" ? keyring.keys : [keyring.get(keyId)].filter(Boolean);
    for (const key of candidates) {
      isAnyTried = true;
      if (await key.made(signature, message)) signers.push(key);
      else if (keyId !== "") throw new Forged(`the signature by key ${keyId} does not hold`);
    }
  }
  if (signers.length) return signers;
  if (!isAnyTried) {
    const named = signatures.map(({ keyId }) => quoted(keyId, 64)).join(", ");
    throw new UnknownKey(`none of the keys that signed is known: ${named}`);
  }
  throw new Forged("no signature holds, by any of the keys");
}

/**
 * Who signed an envelope that carries no time, so that a revoked key does not count: a verdict, why it is not ok, and
 * the ids of held keys whose signature holds. ``forged`` makes the error of a held key that did not sign.
 */
export async function judgeEnvelope(envelope, keyring, forged) {
  if (keyring === null) return { verdict: "not_checked", detail: null, keyIds: [] };
  let signers;
  try {
    signers = await signersOf(envelope, keyring);
  } catch (error) {
    if (error instanceof UnknownKey) return { verdict: "unknown_key", detail: error.message, keyIds: [] };
    throw error instanceof Forged ? forged(error.message) : error;
  }
  const keyIds = signers.map((key) => key.id);
  if (!signers.every((key) => key.revokedFrom)) return { verdict: "ok", detail: null, keyIds };
  const [{ id, revokedFrom }] = signers;
  return { verdict: "unknown_key", detail: `key ${id} is revoked from HLC ${revokedFrom.text} on`, keyIds };
}
