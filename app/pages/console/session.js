// Who uses the console, what he may see, and which tenants there are for him.

import { ask, get, getIfAllowed } from "./api.js";

const TENANTS_LISTED_MAX = 500;

export class Session {
  constructor(how, who, ledger) {
    this.mode = how.auth_mode;
    this.oidc = how.oidc_sign_in;
    this.expiresAt = how.expires_at;
    this.traceUrl = how.trace_url;
    this.principal = who?.principal ?? null;
    this.grants = who?.grants ?? [];
    this.known = Boolean(who);
    this.ledger = ledger;
    this.listed = null;
  }

  /** Whether the caller has a right, for a tenant or for any. */
  may(right, tenant = null) {
    const wanted = right === "read" && tenant === "_system" ? "audit" : right;
    return this.grants.some(
      (grant) =>
        grant.rights.includes(wanted) && (tenant === null || grant.tenants.some((pattern) => covers(pattern, tenant))),
    );
  }

  /** Tenants that the caller may ask about, as far as they are known; `more` where there are others. */
  async tenants() {
    if (this.listed === null) {
      const named = this.grants.flatMap((grant) => grant.tenants).filter((each) => !each.endsWith("*"));
      const page = this.may("audit") ? await getIfAllowed("/v1/tenants", { limit: TENANTS_LISTED_MAX }) : null;
      const found = page ? page.items.map((item) => item.tenant_id) : [];
      this.listed = {
        names: [...new Set([...found, ...named])].sort(bySystemLast),
        more: page ? page.next_cursor !== null : true,
      };
    }
    return this.listed;
  }

  /** Forget them: there may be others by now. */
  refresh() {
    this.listed = null;
  }
}

/** Who uses the console now. */
export async function currentSession() {
  const how = await get("/v1/console/session");
  const who = how.auth_mode === "none" || how.principal !== null ? await getIfAllowed("/v1/whoami") : null;
  const keys = who && (await getIfAllowed("/v1/keys").catch(() => null));
  return new Session(how, who, keys?.root_key_id);
}

export const signIn = (token) => ask("POST", "/v1/console/session", { json: { token } });
export const signOut = () => ask("DELETE", "/v1/console/session");

function covers(pattern, tenant) {
  if (pattern === "*") return true;
  return pattern.endsWith("*") ? tenant.startsWith(pattern.slice(0, -1)) && tenant !== "_system" : pattern === tenant;
}

function bySystemLast(one, other) {
  return (one === "_system") - (other === "_system") || (one < other ? -1 : 1);
}
