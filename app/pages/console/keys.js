// Keys: which count, since when, who vouched for them; and those that wait to be admitted.

import { get } from "./api.js";
import { fill, h, panel, table, tag, waiting } from "./dom.js";
import { time } from "./times.js";

export async function keys(ctx) {
  const place = h("div", {}, waiting("Reading the keys"));
  ctx.show("Keys", h("h1", {}, "Keys"), place);
  const found = await get("/v1/keys", {}, ctx.signal);
  const verifierKeys = [...found.log_verifier_keys, ...found.second_log_verifier_keys];
  fill(
    place,
    found.not_admitted.length > 0 &&
      h(
        "section",
        { class: "panel fault warn" },
        table("Keys that wait to be admitted: what they sign does not count yet", columns(found), found.not_admitted),
        h(
          "p",
          { class: "do" },
          "Compare the id with what the node itself says, then: ",
          h("code", {}, "tally keys admit ID"),
          ".",
        ),
      ),
    panel(null, table("Keys that were admitted", columns(found), [...found.keys, ...found.second_keys])),
    panel(
      "Keys of logs",
      h("p", {}, "What a witness, or who reads the logs, checks checkpoints with:"),
      h("pre", { tabindex: "0" }, verifierKeys.join("\n") || "None that you may audit."),
    ),
    h(
      "p",
      { class: "actions" },
      h("button", { type: "button", onclick: () => save(found) }, "Save keys.json"),
      " ",
      h(
        "span",
        { class: "soft" },
        "for offline verification. Trust it only if it came to you in another way than what it verifies.",
      ),
    ),
  );
}

const columns = (found) => [
  {
    name: "Key",
    heads: true,
    of: (key) => [h("code", {}, key.key_id), " ", key.key_id === found.root_key_id && tag("root")],
  },
  { name: "Kind", of: (key) => key.algorithm },
  { name: "Node", of: (key) => key.node_id ?? "–" },
  {
    name: "Signs",
    of: (key) =>
      [key.signs_snapshots && "snapshots", key.signs_checkpoints && "checkpoints"].filter(Boolean).join(", ") ||
      "no more",
  },
  { name: "Counts from", of: (key) => time(key.not_before) },
  {
    name: "Until",
    of: (key) => (key.revoked_from_hlc ? tag("revoked", "bad") : key.not_after ? time(key.not_after) : "now"),
  },
  {
    name: "Admitted by",
    of: (key) => (key.key_id === found.root_key_id ? "itself" : key.admitted_by ? h("code", {}, key.admitted_by) : "–"),
  },
];

function save(found) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(found, null, 2)], { type: "application/json" }));
  h("a", { href: address, download: "keys.json" }).click();
  URL.revokeObjectURL(address);
}
