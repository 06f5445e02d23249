// Which jobs a file is about, so that their entries can be found again. States are not folded: what is shown of a job
// is what the entries say.

import { JOB_EVENTS } from "./facts.js";

const JOBS_MAX = 20_000;
const ACTIONS_MAX = 200;

export class JobIndex {
  constructor() {
    this.byId = new Map();
    this.actions = new Map();
    this.left = 0;
  }

  take(row) {
    if (this.actions.has(row.action) || this.actions.size < ACTIONS_MAX) {
      this.actions.set(row.action, (this.actions.get(row.action) ?? 0) + 1);
    }
    let job = this.byId.get(row.job_id);
    if (job === undefined) {
      if (this.byId.size === JOBS_MAX) {
        this.left++;
        return;
      }
      job = { isJob: false, seqs: [], firstMs: row.hlc_physical, lastMs: 0, lastAction: "" };
      this.byId.set(row.job_id, job);
    }
    job.isJob ||= Object.hasOwn(JOB_EVENTS, row.action);
    job.seqs.push(row.seq);
    job.lastMs = row.hlc_physical;
    job.lastAction = row.action;
  }

  seqsOf(jobId) {
    return this.byId.get(jobId)?.seqs ?? [];
  }

  /** What the page shows: the subjects in the order of their first entry, and how often each action stands there. */
  told() {
    const items = [...this.byId].map(([jobId, { seqs, ...job }]) => ({ jobId, ...job, entries: seqs.length }));
    const actions = [...this.actions].sort(([, one], [, other]) => other - one);
    return { items, actions, left: this.left };
  }
}
