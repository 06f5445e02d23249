// The page: what the reader gives, when it is judged, and where the verdict goes.

import { element, plain } from "./element.js";
import { Engine } from "./engine.js";
import { kindOf, sizeOf, subjectOf, textOf } from "./given.js";
import { outcomeText, report, saveFile } from "./report.js";

const TITLE = document.title;
const COULD_NOT_RUN = 1;
const READS = { keys: "readKeys", checkpoint: "readCheckpoint", witness: "readWitnessKey", policy: "readPolicy" };
const SINGLE = ["checkpoint", "policy"];

// The page as it came, before anything was given to it.
const SOURCE = `<!doctype html>\n${document.documentElement.outerHTML}\n`;

const at = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.engine = new Engine();
    this.given = { subject: null, keys: [], checkpoint: null, witness: [], policy: null };
    this.turn = 0;
    this.taking = Promise.resolve();
  }

  /** Takes files, all of them or none; ``role`` is what they were given as, null where that is to be seen from them. */
  async take(files, role = null) {
    const taken = this.taking.then(() => this.#take(files, role));
    this.taking = taken;
    if (await taken) await this.judge();
  }

  async #take(files, role) {
    this.say(null);
    const given = { ...this.given };
    try {
      for (const file of files) await this.#takeOne(given, file, role ?? (await kindOf(file)));
    } catch (error) {
      this.say(error.message);
      return false;
    }
    this.given = given;
    this.#showGiven();
    return true;
  }

  async #takeOne(given, file, role) {
    if (role === "subject") {
      given.subject = file;
      return;
    }
    const text = await textOf(file);
    const texts = role === "witness" ? text.split("\n").filter((line) => line.trim() !== "") : [text];
    for (const each of texts) {
      const read = await this.engine.ask(READS[role], { text: each }).catch((error) => {
        throw new Error(`${file.name}: ${error.message}`);
      });
      const taken = { name: file.name, text: each, read };
      if (SINGLE.includes(role)) given[role] = taken;
      else given[role] = [...given[role].filter((other) => other.text !== each), taken];
    }
  }

  /** Judges what was given, as soon as there is a file; what was under way before is forgotten. */
  async judge() {
    const { subject, keys, checkpoint, witness, policy } = this.given;
    if (subject === null) return;
    const turn = ++this.turn;
    this.#forget();
    this.#progress({ phase: "Reading the file", done: 0, total: 1 });
    try {
      const { kind, looksLike } = await subjectOf(subject);
      if (kind === null) throw new Error(`${subject.name} is no bundle and no receipt; it looks like ${looksLike}`);
      const given = {
        file: subject,
        isReceipt: kind === "receipt",
        keys: keys.length ? keys.map(({ text }) => text) : null,
        checkpoint: checkpoint?.text ?? null,
        witnessKeys: witness.map(({ text }) => text),
        policy: policy?.text ?? null,
        signatures: at("both").checked ? "both" : "any",
      };
      const onProgress = (progress) => turn === this.turn && this.#progress(progress);
      const found = await this.engine.ask("judge", given, onProgress);
      if (turn === this.turn) this.#show(found);
    } catch (error) {
      if (turn === this.turn) this.#couldNotRead(error);
    } finally {
      if (turn === this.turn) at("progress").hidden = true;
    }
  }

  #show(found) {
    const { subject } = this.given;
    const verifiedAt = `${new Date().toISOString().slice(0, 19)}Z`;
    const made = report(found, { subject, verifiedAt }, (task, given) => this.engine.ask(task, given));
    at("verdict").replaceChildren(made);
    at("announced").textContent = outcomeText(found.exitCode, found.verdict);
    document.title = `${outcomeText(found.exitCode, found.verdict).split(":")[0]} · ${subject.name}`;
    at("verdict").focus({ preventScroll: true });
    at("verdict").scrollIntoView({ block: "start" });
  }

  /** What was said of something else is not shown beside this. */
  #forget() {
    at("verdict").replaceChildren();
    document.title = TITLE;
  }

  #couldNotRead(error) {
    const isBrowser = error.message.includes("Unrecognized") || error.message.includes("NotSupported");
    this.say(
      isBrowser
        ? `This browser cannot check signatures (${error.message}). Chrome 137, Firefox 129 and Safari 17 can.`
        : `COULD NOT BE READ: ${error.message}`,
    );
  }

  #progress({ phase, done, total }) {
    at("progress").hidden = false;
    at("phase").textContent = `${phase}: ${Math.floor((100 * done) / Math.max(1, total))} %`;
    at("bar").value = done / Math.max(1, total);
  }

  /** Says what is wrong with what was given; null takes it back. */
  say(message) {
    at("problem").hidden = message === null;
    at("problem").textContent = message === null ? "" : plain(message);
  }

  #showGiven() {
    const { subject, keys, checkpoint, witness, policy } = this.given;
    show(at("subject-given"), subject && [`${plain(subject.name)}, ${sizeOf(subject.size)}`]);
    const remove = (role, taken) => () => {
      this.given[role] = SINGLE.includes(role) ? null : this.given[role].filter((other) => other !== taken);
      this.#showGiven();
      this.judge();
    };
    const kept =
      checkpoint && `${plain(checkpoint.name)}: ${plain(checkpoint.read.origin)}, size ${checkpoint.read.size} `;
    show(at("checkpoint-given"), checkpoint && [kept, removal(checkpoint, remove("checkpoint", checkpoint))]);
    const asked = policy && `${plain(policy.name)}: quorum ${plain(policy.read.quorum)} `;
    show(at("policy-given"), policy && [asked, removal(policy, remove("policy", policy))]);
    const item = (role, what) => (taken) =>
      element(
        "li",
        {},
        element("span", {}, `${plain(taken.name)}: `, element("code", {}, plain(what(taken.read)))),
        removal(taken, remove(role, taken)),
      );
    show(
      at("keys-given"),
      keys.length && keys.map(item("keys", (read) => read.keys.map((key) => key.key_id).join(", "))),
    );
    show(at("witness-given"), witness.length && witness.map(item("witness", (read) => `${read.name}+${read.hash}`)));
  }
}

function show(place, children) {
  place.hidden = !children;
  place.replaceChildren(...(children || []));
}

function removal({ name }, onclick) {
  return element("button", { type: "button", class: "link", "aria-label": `Remove ${name}`, onclick }, "remove");
}

function listen(page) {
  for (const role of ["subject", ...Object.keys(READS)]) {
    at(role).addEventListener("change", async ({ target }) => {
      const files = [...target.files];
      target.value = "";
      await page.take(files, role);
    });
  }
  at("both").addEventListener("change", () => page.judge());
  const hold = (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", event.type === "dragover");
  };
  for (const type of ["dragenter", "dragover", "dragleave"]) document.addEventListener(type, hold);
  document.addEventListener("drop", (event) => {
    hold(event);
    page.take([...event.dataTransfer.files]);
  });
  at("save-page").addEventListener("click", () => saveFile("verify.html", "text/html", SOURCE));
  globalThis.addEventListener("beforeprint", () =>
    document.querySelectorAll(".more").forEach((each) => (each.open = false)),
  );
}

const page = new Page();
if (!globalThis.crypto?.subtle) {
  page.say(
    "A browser gives its cryptography only to pages from https, from localhost or from disk: save this page first.",
  );
}
listen(page);

/**
 * For programs, and for the console of a browser: the verdict on a file; null, with exit code 1 and what it looks like,
 * where it is no bundle and no receipt.
 *
 * @param {Blob} file
 * @param {{keys: ?string[], checkpoint: ?string, witnessKeys: ?string[], policy: ?string, signatures: ?string}} against
 *     texts of what is trusted or was kept, and whether ``any`` signature is enough or ``both`` are demanded.
 */
globalThis.tallystickVerify = async (file, against = {}) => {
  const { kind, looksLike } = await subjectOf(file);
  if (kind === null) return { exitCode: COULD_NOT_RUN, verdict: null, looksLike };
  const nothing = { keys: null, checkpoint: null, witnessKeys: [], policy: null, signatures: "any" };
  return page.engine.ask("judge", { ...nothing, ...against, file, isReceipt: kind === "receipt" });
};
