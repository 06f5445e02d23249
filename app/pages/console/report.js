// The report on a tenant's jobs of a period, which the service makes in the background, as a file.

import { ask, get, saveBlob } from "./api.js";
import { fill, h } from "./dom.js";

const ASK_AGAIN_AFTER_MS = 300;
const OF_SPARK_AFTER_MS = 2000;
/** How often in a row another node than the one that makes the report may answer, which a balancer chose. */
const ELSEWHERE_MAX = 20;

/** The button that asks for a report on the jobs of `{ since, until }`, and the place that says how far it is. */
export function reportParts(ctx, tenant, { since, until }) {
  const said = h("span", { role: "status" });
  const progress = h("span", { class: "soft" }); // It changes too often to be read aloud.
  const kept = `report ${tenant}`; // The report that is being made, for who comes back to the page.
  const wanted = { tenant_id: tenant, ...(since && { since }), ...(until && { until }) };
  const advance = (words) => {
    if (words && !progress.textContent)
      fill(
        said,
        h("progress", { "aria-label": "Making the report" }),
        " Spark makes the report, as there is much to read. That takes minutes: you may leave this page and come back.",
      );
    fill(progress, words && ` ${words}`);
  };
  const run = async () => {
    button.disabled = true;
    fill(said, h("progress", { "aria-label": "Making the report" }), " Making the report …");
    try {
      const id = sessionStorage.getItem(kept) ?? (await ask("POST", "/v1/reports", { json: wanted })).report_id;
      sessionStorage.setItem(kept, id);
      saveBlob(new Blob([await made(id, ctx.signal, advance)], { type: "text/html" }), `${tenant}.report.html`);
      sessionStorage.removeItem(kept);
      fill(said, `${tenant}.report.html is downloaded.`);
    } catch (error) {
      if (error.name === "AbortError") return;
      sessionStorage.removeItem(kept);
      fill(said, `No report: ${error.message}`);
    }
    fill(progress);
    button.disabled = false;
  };
  const button = h("button", { type: "button", class: "quiet actions", onclick: run }, "Report");
  if (sessionStorage.getItem(kept)) run();
  return { button, told: h("p", {}, said, progress) };
}

/** The page, once it is made; `advance` is called with how far Spark is. */
async function made(id, signal, advance) {
  for (let elsewhere = 0; ; ) {
    let waitMs = ASK_AGAIN_AFTER_MS;
    try {
      const answer = await get(`/v1/reports/${id}`, {}, signal);
      if (typeof answer === "string") return answer;
      advance(answer.progress);
      if (answer.progress) waitMs = OF_SPARK_AFTER_MS;
      elsewhere = 0;
    } catch (error) {
      if (error.kind !== "report-elsewhere" || ++elsewhere > ELSEWHERE_MAX) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}
