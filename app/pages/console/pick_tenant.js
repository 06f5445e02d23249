// Choosing the tenant that a page is about.

import { h, field } from "./dom.js";

/** A form that leads to `address(tenant)`; a list where all tenants are known, else a field. */
export async function pickTenant(ctx, current, address) {
  const { names, more } = await ctx.session.tenants();
  const go = (tenant) => location.assign(address(tenant));
  if (!more && names.includes(current)) {
    const options = names.map((name) => h("option", { value: name, selected: name === current }, name));
    const select = h("select", { name: "tenant", onchange: () => go(select.value) }, options);
    return field("Tenant", select);
  }
  const input = h("input", {
    name: "tenant",
    value: current,
    list: "tenants",
    autocomplete: "off",
    spellcheck: "false",
  });
  const known = h(
    "datalist",
    { id: "tenants" },
    names.map((name) => h("option", { value: name })),
  );
  input.addEventListener("change", () => input.value.trim() && go(input.value.trim()));
  return h("span", {}, field("Tenant", input), known);
}

/** The name of a tenant in an address. */
export const named = encodeURIComponent;
