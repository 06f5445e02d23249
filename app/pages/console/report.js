// The report on a tenant's jobs of a period, which the service makes in the background, as a file.

import { ask, get, saveBlob } from "./api.js";
import { fill, h } from "./dom.js";

const ASK_AGAIN_AFTER_MS = 300;

/** The button that asks for a report on the jobs of `{ since, until }`, and the place that says how far it is. */
export function reportParts(ctx, tenant, { since, until }) {
  const told = h("p", { role: "status" });
  const wanted = { tenant_id: tenant, ...(since && { since }), ...(until && { until }) };
  const run = async () => {
    button.disabled = true;
    fill(told, h("progress", { "aria-label": "Making the report" }), " Making the report …");
    try {
      saveBlob(new Blob([await made(wanted, ctx.signal)], { type: "text/html" }), `${tenant}.report.html`);
      fill(told, `${tenant}.report.html is downloaded.`);
    } catch (error) {
      fill(told, error.name !== "AbortError" && `No report: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  };
  const button = h("button", { type: "button", class: "quiet actions", onclick: run }, "Report");
  return { button, told };
}

async function made(wanted, signal) {
  const { report_id: id } = await ask("POST", "/v1/reports", { json: wanted, signal });
  for (;;) {
    const page = await get(`/v1/reports/${id}`, {}, signal);
    if (typeof page === "string") return page;
    await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_AFTER_MS));
  }
}
