// Who read, did or was refused what; and tokens, for who administers them.

import { ask, get } from "./api.js";
import { confirm } from "./confirm.js";
import { fill, h, panel, table, tag, waiting } from "./dom.js";
import { named, pickTenant } from "./pick_tenant.js";
import { ago, time } from "./times.js";

const KINDS = { read: "", act: "warn", refusal: "bad" };

export async function access(ctx) {
  const [name] = ctx.rest;
  const { session } = ctx;
  const place = h("div", {}, waiting("Reading the access log"));
  ctx.show(
    "Access",
    h("h1", {}, "Access"),
    rights(session),
    session.may("admin") && h("p", { class: "actions" }, h("a", { class: "button", href: "#/tokens" }, "Tokens")),
    session.may("audit")
      ? [h("div", { class: "panel row" }, await pickTenant(ctx, name, (tenant) => `#/access/${named(tenant)}`)), place]
      : null,
  );
  if (!session.may("audit")) return;
  const page = await get("/v1/access-log", { tenant_id: name, limit: 50, cursor: ctx.query.get("cursor") }, ctx.signal);
  fill(
    place,
    panel(
      null,
      page.items.length
        ? table(
            `Who read, did or was refused what of ${name}, newest first (log of this node)`,
            [
              { name: "When", heads: true, of: (line) => time(line.at) },
              { name: "Who", of: (line) => line.actor ?? "nobody known" },
              { name: "What", of: (line) => tag(line.kind, KINDS[line.kind]) },
              { name: "Request", of: (line) => h("code", {}, line.path) },
              { name: "From", of: (line) => line.address ?? "–" },
              {
                name: "More",
                of: (line) =>
                  h(
                    "code",
                    {},
                    Object.entries(line.what)
                      .map(([key, value]) => `${key} ${JSON.stringify(value)}`)
                      .join(", "),
                  ),
              },
            ],
            page.items,
          )
        : h(
            "p",
            {},
            session.mode === "none"
              ? "Nothing: while nobody is asked who he is, reads are not on record."
              : "Nothing yet.",
          ),
    ),
    page.next_cursor &&
      h(
        "a",
        { class: "button", href: `#/access/${named(name)}?${new URLSearchParams({ cursor: page.next_cursor })}` },
        "Older",
      ),
  );
}

function rights(session) {
  if (session.principal === null) return null;
  return panel(
    null,
    table(
      "What you may do",
      [
        { name: "For", heads: true, of: (grant) => h("code", {}, grant.tenants.join(", ")) },
        { name: "Rights", of: (grant) => grant.rights.join(", ") },
      ],
      session.grants,
    ),
    session.expiresAt &&
      h("p", { class: "soft" }, "Your session ends ", ago(session.expiresAt), ": ", time(session.expiresAt)),
  );
}

export async function tokens(ctx) {
  const place = h("div", {}, waiting("Reading the tokens"));
  ctx.show("Tokens", h("h1", {}, "Tokens"), place);
  const draw = async () => {
    const { items } = await get("/v1/tokens", {}, ctx.signal);
    fill(
      place,
      panel(null, table("Tokens for tenants that you administer, newest first", columns(ctx, again), items)),
      h(
        "p",
        { class: "soft" },
        "A new one: ",
        h("code", {}, "tally token new NAME -r RIGHT -t TENANT"),
        ". It is printed once, there alone.",
      ),
    );
  };
  const again = () => draw().catch((error) => error.name !== "AbortError" && ctx.fail(error, place));
  await draw();
}

const columns = (ctx, again) => [
  { name: "Name", heads: true, of: (token) => token.name },
  { name: "Id", of: (token) => h("code", {}, token.token_id) },
  { name: "Rights", of: (token) => token.rights.join(", ") },
  { name: "Tenants", of: (token) => h("code", {}, token.tenants.join(", ")) },
  { name: "Issued", of: (token) => [time(token.issued_at), token.issued_by && ` by ${token.issued_by}`] },
  { name: "State", of: (token) => stateOf(token) },
  {
    name: "Revoke",
    of: (token) =>
      !token.revoked &&
      h(
        "button",
        {
          type: "button",
          class: "danger quiet",
          "aria-label": `Revoke ${token.name} ${token.token_id}`,
          onclick: () => revoke(ctx, token, again),
        },
        "Revoke",
      ),
  },
];

function stateOf(token) {
  if (token.revoked) return tag("revoked", "bad");
  if (token.expires_at && new Date(token.expires_at) <= new Date()) return tag("expired");
  return [tag("counts", "ok"), token.expires_at && [" until ", time(token.expires_at)]];
}

function revoke(ctx, token, again) {
  confirm(
    ctx,
    { title: `Revoke the token ${token.name}?`, yes: "Revoke", no: "Keep it" },
    h("p", {}, "It counts no more at once on this node, and within a second on the others. It cannot be taken back."),
    async () => {
      await ask("DELETE", `/v1/tokens/${named(token.token_id)}`);
      ctx.say(`Token ${token.name} is revoked`);
      again();
    },
  );
}
