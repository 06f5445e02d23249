// Asking before something is done that cannot be taken back.

import { fill, h } from "./dom.js";
import { PROBLEMS } from "./facts.js";

/** A dialog with `children`, whose button `yes` calls `act()`; why that failed is said in it, else it closes. */
export function confirm(ctx, { title, yes, no, kind = "danger" }, children, act) {
  const told = h("p", { role: "alert" });
  const close = () => dialog.close();
  const button = h("button", { class: kind }, yes);
  const run = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await act();
      close();
    } catch (error) {
      const advice = PROBLEMS[error.kind];
      fill(told, error.message, advice && [" ", advice]);
      button.disabled = false;
    }
  };
  const dialog = h(
    "dialog",
    { "aria-labelledby": "confirm-title", onclose: () => dialog.remove() },
    h(
      "form",
      { onsubmit: run },
      h("h2", { id: "confirm-title" }, title),
      children,
      told,
      h("div", { class: "row" }, button, h("button", { type: "button", onclick: close }, no)),
    ),
  );
  ctx.signal.addEventListener("abort", close);
  document.body.append(dialog);
  dialog.showModal();
}
