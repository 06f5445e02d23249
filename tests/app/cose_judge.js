// Prints the root that @transmute/cose finds proved: node judge.js RECEIPT LEAF_DATA_HEX PUBLIC_KEY_PEM
const fs = require("fs");
const crypto = require("crypto");
const cose = require("@transmute/cose");
const [receiptPath, link, keyPath] = process.argv.slice(2);
const key = crypto.createPublicKey(fs.readFileSync(keyPath));
const verifier = {
  verify: async ({ coseSign1, payload }) => {
    const [protectedHeader, , , signature] = cose.cbor.decode(coseSign1).value;
    const signed = cose.cbor.encode(["Signature1", protectedHeader, Buffer.alloc(0), Buffer.from(payload)]);
    if (!crypto.verify(null, Buffer.from(signed), key, Buffer.from(signature))) throw new Error("signature");
    return payload;
  },
};
(async () => {
  const entry = await cose.receipt.leaf(Buffer.from(link, "hex"));
  const root = await cose.receipt.inclusion.verify({ entry, receipt: fs.readFileSync(receiptPath), verifier });
  console.log(Buffer.from(root).toString("hex"));
})().catch((error) => { console.error(String(error)); process.exit(1); });
