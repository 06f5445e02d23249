// The way to the worker, which is made of a text that stands in the page: nothing is loaded.

export class Engine {
  constructor() {
    const source = document.getElementById("engine").textContent;
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    // The one script that this page makes, of its own text; nothing else may become script (Trusted Types).
    const trusted = globalThis.trustedTypes?.createPolicy("tallystick-verify", {
      createScriptURL: (made) => {
        if (made !== url) throw new TypeError("no other script");
        return made;
      },
    });
    this.worker = new Worker(trusted ? trusted.createScriptURL(url) : url, { name: "verify" });
    this.asked = new Map();
    this.lastId = 0;
    this.worker.onmessage = ({ data }) => this.#answer(data);
    this.worker.onerror = (event) => this.#fail(event.message || "the worker could not be started");
  }

  /** The answer to a task; rejects with an error whose ``isMalformed`` says whether the given file is to blame. */
  ask(task, given, onProgress = () => {}) {
    const id = ++this.lastId;
    return new Promise((resolve, reject) => {
      this.asked.set(id, { resolve, reject, onProgress });
      this.worker.postMessage({ id, task, given });
    });
  }

  #answer({ id, progress, result, error }) {
    const asked = this.asked.get(id);
    if (progress !== undefined) {
      asked.onProgress(progress);
      return;
    }
    this.asked.delete(id);
    if (error === undefined) asked.resolve(result);
    else asked.reject(Object.assign(new Error(error.message), { isMalformed: error.isMalformed }));
  }

  #fail(message) {
    for (const { reject } of this.asked.values()) reject(new Error(message));
    this.asked.clear();
  }
}
