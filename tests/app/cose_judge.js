// What @transmute/cose says of COSE.
//   node judge.js receipt RECEIPT LEAF_DATA_HEX PUBLIC_KEY_PEM    prints the root that is proved
//   node judge.js statement STATEMENT PUBLIC_KEY_PEM              verifies a signed statement by ES256; prints what
//                                                                 it takes for the bytes on the ledger
const fs = require("fs");
const crypto = require("crypto");
const cose = require("@transmute/cose");
const ed25519 = (key) => ({
  verify: async ({ coseSign1, payload }) => {
    const [protectedHeader, , , signature] = cose.cbor.decode(coseSign1).value;
    const signed = cose.cbor.encode(["Signature1", protectedHeader, Buffer.alloc(0), Buffer.from(payload)]);
    if (!crypto.verify(null, Buffer.from(signed), key, Buffer.from(signature))) throw new Error("signature");
    return payload;
  },
});
const judges = {
  receipt: async (path, link, keyPath) => {
    const entry = await cose.receipt.leaf(Buffer.from(link, "hex"));
    const verifier = ed25519(crypto.createPublicKey(fs.readFileSync(keyPath)));
    return cose.receipt.inclusion.verify({ entry, receipt: fs.readFileSync(path), verifier });
  },
  statement: async (path, keyPath) => {
    const jwk = { ...crypto.createPublicKey(fs.readFileSync(keyPath)).export({ format: "jwk" }), alg: "ES256" };
    const verifier = cose.attached.verifier({ resolver: { resolve: async () => jwk } });
    await verifier.verify({ coseSign1: fs.readFileSync(path) });
    return cose.receipt.remove(fs.readFileSync(path));
  },
};
const [judge, ...given] = process.argv.slice(2);
judges[judge](...given)
  .then((bytes) => console.log(Buffer.from(bytes).toString("hex")))
  .catch((error) => { console.error(String(error)); process.exit(1); });
