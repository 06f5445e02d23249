// Bundles: a tenant's ledger, or a range of it, as a file; and files of others taken in.

import { ask, Problem, save } from "./api.js";
import { count, facts, field, fill, h, json, panel, plural, short, table, tag } from "./dom.js";
import { named } from "./pick_tenant.js";

export async function bundles(ctx) {
  const { session } = ctx;
  ctx.show(
    "Bundles",
    h("h1", {}, "Bundles"),
    h(
      "p",
      {},
      "A bundle holds entries, proofs, signatures and keys of a tenant. Whoever has it verifies it offline: ",
      h("a", { href: "verify" }, "in a browser"),
      ", or with ",
      h("code", {}, "tally verify-bundle"),
      ".",
    ),
    h(
      "div",
      { class: "grid" },
      session.may("audit") && (await exportForm(ctx)),
      session.may("operate") && importForm(ctx),
    ),
  );
}

async function exportForm(ctx) {
  const { names } = await ctx.session.tenants();
  const told = h("p", { role: "status" });
  const tenant = h("input", {
    name: "tenant",
    required: true,
    list: "known-tenants",
    autocomplete: "off",
    spellcheck: "false",
    value: ctx.rest[0] ?? sessionStorage.getItem("tenant") ?? "",
  });
  const from = h("input", { type: "number", min: "1", name: "from", placeholder: "first" });
  const to = h("input", { type: "number", min: "1", name: "to", placeholder: "last" });
  const button = h("button", { class: "main" }, "Export");
  const run = async (event) => {
    event.preventDefault();
    button.disabled = true;
    fill(told, "Signing and packing …");
    const wanted = { tenant_id: tenant.value.trim() };
    if (from.value) wanted.from_seq = Number(from.value);
    if (to.value) wanted.to_seq = Number(to.value);
    try {
      await save("POST", "/v1/bundles/export", `${wanted.tenant_id}.bundle.tar`, { json: wanted, signal: ctx.signal });
      fill(told, `${wanted.tenant_id}.bundle.tar is downloaded.`);
    } catch (error) {
      if (error.name !== "AbortError") fill(told, error.message);
    } finally {
      button.disabled = false;
    }
  };
  return panel(
    "Export",
    h(
      "form",
      { onsubmit: run },
      h(
        "datalist",
        { id: "known-tenants" },
        names.map((name) => h("option", { value: name })),
      ),
      h("div", { class: "row" }, field("Tenant", tenant), field("From entry", from), field("To entry", to), button),
    ),
    told,
    h(
      "p",
      { class: "soft" },
      "The browser holds all of it while it comes; for millions of entries use ",
      h("code", {}, "tally bundle export"),
      ".",
    ),
  );
}

function importForm(ctx) {
  const files = h("input", { type: "file", multiple: true, name: "files", "aria-describedby": "import-help" });
  const result = h("div", { "aria-live": "polite" });
  const dry = h("button", { class: "main" }, "See what would come of it");
  const real = h("button", { type: "button", disabled: true }, "Import");
  const drop = h(
    "div",
    { class: "drop" },
    field("Files of bundles", files),
    h(
      "p",
      { class: "soft", id: "import-help" },
      "Or drop them here. Nothing is stored before you have seen what would come of it.",
    ),
  );
  const changed = () => {
    real.disabled = true;
    fill(result);
  };
  files.addEventListener("change", changed);
  for (const [type, over] of [
    ["dragover", true],
    ["dragleave", false],
    ["drop", false],
  ]) {
    drop.addEventListener(type, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", over);
      if (type === "drop" && !files.disabled) {
        files.files = event.dataTransfer.files;
        changed();
      }
    });
  }
  const run = async (isDry) => {
    if (!files.files.length) return void fill(result, h("p", { role: "alert" }, "Choose a file first."));
    const body = new FormData();
    for (const file of files.files) body.append("file", file, file.name);
    // No other files are taken meanwhile: what is imported is what was looked at.
    dry.disabled = real.disabled = files.disabled = true;
    fill(
      result,
      h("progress", { "aria-label": isDry ? "Verifying" : "Importing" }),
      h("p", {}, isDry ? "Verifying …" : "Importing …"),
    );
    let holds = false;
    try {
      const found = await ask("POST", "/v1/bundles/import", { query: { dry_run: isDry }, body, signal: ctx.signal });
      holds = true;
      fill(result, outcome(found));
      ctx.say(isDry ? "The bundle holds" : "The bundle is imported");
    } catch (error) {
      if (error.name !== "AbortError") fill(result, isDry || error.kind ? refusal(error) : unknown(error));
    } finally {
      dry.disabled = files.disabled = false;
      real.disabled = !isDry || !holds;
    }
  };
  real.addEventListener("click", () => run(false));
  return panel(
    "Import",
    h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          run(true);
        },
      },
      drop,
      h("div", { class: "row" }, dry, real),
    ),
    result,
  );
}

function outcome(found) {
  const heads = Object.values(found.new_heads);
  return [
    h("p", {}, tag(found.dry_run ? "dry run: nothing was stored" : "✓ imported", found.dry_run ? "warn" : "ok")),
    facts({
      Bundles: count(found.bundles),
      "Entries in them": count(found.entries),
      [found.dry_run ? "Would be added" : "Added"]: count(found.imported),
      "There already": count(found.duplicates),
      Conflicts: count(found.conflicts.length),
      "Jobs that change": count(found.jobs_changed),
    }),
    table(
      "The chains then",
      [
        {
          name: "Tenant",
          heads: true,
          of: (head) => h("a", { href: `#/tenant/${named(head.tenant_id)}` }, head.tenant_id),
        },
        { name: "Entries", number: true, of: (head) => count(head.seq) },
        { name: "Link", of: (head) => short(head.chain_link) },
      ],
      heads,
      { unseen: true },
    ),
    found.conflicts.length > 0 &&
      h("details", {}, h("summary", {}, plural(found.conflicts.length, "conflict")), json(found.conflicts)),
  ];
}

/** Of an import that the service has not answered itself. */
function unknown(error) {
  return h(
    "div",
    { class: "panel fault", role: "alert" },
    h("h3", {}, "It is not known whether it was stored"),
    h("p", {}, error.message),
    h("p", { class: "do" }, "Look once more what would come of it: what is there already is counted, and stored once."),
  );
}

function refusal(error) {
  const verdict = error instanceof Problem ? error.body.verdict : null;
  return h(
    "div",
    { class: "panel fault", role: "alert" },
    h("h3", {}, error.title ?? "Not taken"),
    h("p", {}, error.message),
    verdict && json(verdict),
    error.kind === "untrusted-key" &&
      h(
        "p",
        { class: "do" },
        "Whoever runs the service names the key in ",
        h("code", {}, "bundle.trusted_keys"),
        ", if it is to be trusted.",
      ),
  );
}
