// Signing in: with a token, or at the issuer.

import { fill, h, field, panel } from "./dom.js";
import { signIn } from "./session.js";

const WHY = {
  ended: "Your session has ended, or its token was revoked. Sign in to go on where you were.",
  refused: "The issuer says who you are, but its token does not count here. The log of the service says why.",
  denied: "The issuer did not let you sign in.",
  unanswered: "The issuer does not answer. The log of the service says why; a token of the ledger works meanwhile.",
};

/** The page; calls `begun` once somebody has signed in. */
export async function signInPage(ctx, why, begun) {
  const { session } = ctx;
  if (!location.hash.startsWith("#/sign")) sessionStorage.setItem("wanted", location.hash || "#/");
  const told = h("p", { role: "alert", class: "soft" }, WHY[why] ?? null);
  const token = h("input", {
    type: "password",
    autocomplete: "off",
    name: "token",
    required: true,
    spellcheck: "false",
    "aria-describedby": "token-help",
  });
  const form = h(
    "form",
    { onsubmit: (event) => submit(event, token, told, begun) },
    h("p", {}, field("Token", token)),
    h(
      "p",
      { id: "token-help", class: "soft" },
      "As ",
      h("code", {}, "tally token new"),
      " printed it. It is sent to this service alone, which keeps it sealed in a cookie that no script can read.",
    ),
    h("button", { class: "main" }, "Sign in"),
  );
  ctx.show(
    "Sign in",
    h(
      "div",
      { class: "sign-in" },
      h("h1", { tabindex: "-1" }, "Sign in"),
      told,
      !window.isSecureContext &&
        panel(
          null,
          h(
            "p",
            {},
            "This page came in the clear: a session would be readable on the way, and browsers do not keep it. Reach the service over https.",
          ),
        ),
      session.oidc &&
        panel("With your account", h("a", { class: "button main", href: "v1/console/oidc" }, "Sign in at the issuer")),
      panel(session.oidc ? "With a token" : null, form),
    ),
  );
}

async function submit(event, token, told, begun) {
  event.preventDefault();
  try {
    await signIn(token.value.trim());
    token.value = "";
    await begun();
  } catch (error) {
    fill(told, error.message);
    token.setAttribute("aria-invalid", "true");
    token.focus();
  }
}
