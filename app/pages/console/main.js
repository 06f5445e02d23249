// The frame: which page stands at which address, who is signed in, and what is said when something goes wrong.

import { get, Problem, signedOut, Unreachable } from "./api.js";
import { fill, h } from "./dom.js";
import { access, tokens } from "./access.js";
import { bundles } from "./bundles.js";
import { callers } from "./callers.js";
import { PROBLEMS } from "./facts.js";
import { home } from "./home.js";
import { job } from "./job.js";
import { jobs } from "./jobs.js";
import { keys } from "./keys.js";
import { nodes } from "./nodes.js";
import { overview } from "./overview.js";
import { replicas } from "./replicas.js";
import { retention } from "./retention.js";
import { currentSession, signOut } from "./session.js";
import { signInPage } from "./sign_in.js";
import { tenant, tenants } from "./tenants.js";
import { time, ZONE } from "./times.js";
import { verify } from "./verify.js";
import { webhooks } from "./webhooks.js";

/** Links to the pages, in groups: of jobs, of the ledger, of who is trusted with it. */
const NAV = [
  [
    ["Overview", () => "#/", () => true],
    ["Jobs", (named) => `#/jobs/${named}`, (session) => session.may("read")],
    ["Nodes", (named) => `#/nodes/${named}`, (session) => session.may("read")],
    ["Webhooks", (named) => `#/webhooks/${named}`, (session) => session.may("admin")],
  ],
  [
    ["Ledger", () => "#/ledger", () => true],
    ["Tenants", () => "#/tenants", (session) => session.may("audit")],
    ["Verify", (named) => `#/verify/${named}`, (session) => session.may("audit")],
    ["Retention", (named) => `#/retention/${named}`, (session) => session.may("audit")],
    ["Bundles", () => "#/bundles", (session) => session.may("audit") || session.may("operate")],
    ["Replicas", () => "#/replicas", () => true],
  ],
  [
    ["Keys", () => "#/keys", () => true],
    ["Callers", () => "#/callers", (session) => session.may("audit")],
    ["Access", (named) => `#/access/${named}`, (session) => session.may("audit") || session.may("admin")],
  ],
];
const PAGES = {
  "": home,
  ledger: overview,
  tenants: tenants,
  tenant: tenant,
  jobs: jobs,
  job: job,
  nodes: nodes,
  verify: verify,
  retention: retention,
  bundles: bundles,
  keys: keys,
  callers: callers,
  replicas: replicas,
  access: access,
  tokens: tokens,
  webhooks: webhooks,
};
const NEEDS_TENANT = new Set(["jobs", "nodes", "webhooks", "verify", "retention", "access"]);
const RETRY_AFTER_MS = 5000;
const SCROLLED_AFTER_MS = 50;

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const menu = document.getElementById("menu");
let session = null;
let leaving = new AbortController();
let retry = null;
let failedAt = null; // Since when the service has not answered.
let scrolled = null;

/** Say something to who cannot see it change. */
function say(text) {
  fill(document.getElementById("say"), text);
}

function parsed() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name = "", ...rest] = path.split("/").map(decoded);
  return { name, rest, query: new URLSearchParams(query) };
}

/** A part of an address; as it stands where somebody typed a percent sign that means none. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Show what stands at the address. */
async function route() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const top = history.state?.top ?? 0;
  clearTimeout(retry);
  clearTimeout(scrolled);
  closeMenu();
  try {
    session ??= await currentSession();
    session.refresh();
    drawFrame();
    const { name, rest, query } = parsed();
    if (!session.known)
      return void (await signInPage(context(signal, rest, query), name === "sign-in" ? rest[0] : "", begin));
    if (name === "sign-in" || name === "signed-in") return void resume();
    if (NEEDS_TENANT.has(name) && !rest[0]) return void (await chooseTenant(name));
    const page = Object.hasOwn(PAGES, name) ? PAGES[name] : notFound;
    main.setAttribute("aria-busy", "true");
    await page(context(signal, rest, query));
    if (signal.aborted) return;
    failedAt = null;
    if (rest[0]) remember(rest[0]);
    // Back to an entry of the history: to where its reader was.
    if (top) scrollWhenTall(top, signal);
  } catch (error) {
    if (error.name !== "AbortError" && !signal.aborted) fail(error);
  } finally {
    if (!signal.aborted) main.removeAttribute("aria-busy");
  }
}

/** Scroll to `top` as soon as the page is tall enough, unless its reader scrolls or leaves first. */
function scrollWhenTall(top, signal) {
  const scroll = () => {
    window.scrollTo(0, top);
    if (window.scrollY >= top) stop();
  };
  const watching = new ResizeObserver(scroll);
  const stop = () => watching.disconnect();
  for (const name of ["wheel", "keydown", "pointerdown"]) window.addEventListener(name, stop, { once: true, signal });
  signal.addEventListener("abort", stop);
  watching.observe(document.body);
}

/** What a page is given. `show` puts it up and moves the focus to its heading. */
function context(signal, rest, query) {
  let shown = false;
  return {
    signal,
    rest,
    query,
    session,
    say,
    fail,
    show(title, ...children) {
      if (signal.aborted) return;
      // A list that leads to what is chosen in it, key by key: its reader is still choosing.
      const chosen = main.contains(document.activeElement) && document.activeElement.closest("select")?.name;
      fill(main, children);
      document.title = `${title} · Tallystick`;
      const heading = main.querySelector("h1");
      heading?.setAttribute("tabindex", "-1");
      // Not with the first page, which a browser reads by itself, nor where a page shows more of itself.
      if (!shown && main.dataset.ready) {
        ((chosen && main.querySelector(`select[name="${chosen}"]`)) || (heading ?? main)).focus();
        window.scrollTo(0, 0);
      }
      shown = true;
      main.dataset.ready = "yes";
    },
  };
}

/** Somebody signed in: show what he wanted to see. */
async function begin() {
  session = await currentSession();
  resume();
}

function resume() {
  const wanted = sessionStorage.getItem("wanted") || "#/";
  sessionStorage.removeItem("wanted");
  if (location.hash === wanted) route();
  else location.replace(wanted);
}

/** The tenant of a page that could be shown is the one that other pages begin with. */
function remember(tenant) {
  sessionStorage.setItem("tenant", tenant);
  drawFrame();
}

async function chooseTenant(name) {
  const { names } = await session.tenants();
  const kept = sessionStorage.getItem("tenant");
  const chosen = kept || names.find((each) => each !== "_system") || names[0] || "demo";
  location.replace(`#/${name}/${encodeURIComponent(chosen)}`);
}

function notFound(ctx) {
  ctx.show(
    "Not found",
    h("h1", {}, "There is no such page"),
    h("p", {}, "The console has no page at ", h("code", {}, location.hash), "."),
    h("p", {}, h("a", { href: "#/" }, "To the overview")),
  );
}

/** Say what went wrong, and what to do, in place of the page or in `place`. */
function fail(error, place = main) {
  const known = error instanceof Problem;
  const title = known
    ? error.title
    : error instanceof Unreachable
      ? "The service does not answer"
      : "The console failed";
  const what = known || error instanceof Unreachable ? error.message : `${error.name}: ${error.message}`;
  const todo = known
    ? PROBLEMS[error.kind]
    : error instanceof Unreachable
      ? "See whether it runs, and whether you reach it."
      : "";
  if (!known && !(error instanceof Unreachable)) console.error(error);
  const isAway = place === main && (error instanceof Unreachable || error.status === 503);
  if (isAway) {
    failedAt ??= new Date();
    retry = setTimeout(route, RETRY_AFTER_MS);
  }
  fill(
    place,
    h(place === main ? "h1" : "h2", { tabindex: "-1" }, title),
    h(
      "div",
      { class: "panel fault", role: "alert" },
      h("p", {}, what),
      todo && h("p", { class: "do" }, todo),
      isAway && h("p", {}, "No answer since ", time(failedAt.toISOString()), ". This page asks again every 5 seconds."),
      place === main && h("p", {}, h("button", { type: "button", onclick: route }, "Try again")),
    ),
  );
  if (place === main) document.title = `${title} · Tallystick`;
}

function drawFrame() {
  const named = encodeURIComponent(sessionStorage.getItem("tenant") || "");
  const here = parsed().name;
  const current = { tenant: "tenants", job: "jobs", tokens: "access" }[here] ?? here;
  const linkOf = ([text, to]) => [text, to(named), to(named).split("/")[1] === current];
  const allowed = (group) => group.filter(([, , when]) => when(session)).map(linkOf);
  const groups = session.known ? NAV.map(allowed) : [];
  const key = JSON.stringify([groups, session.principal]);
  // What is focused stays so where nothing changes.
  if (nav.dataset.key === key) return;
  nav.dataset.key = key;
  fill(
    nav,
    groups.map((links) =>
      h(
        "ul",
        {},
        links.map(([text, address, is]) => h("li", {}, h("a", { href: address, "aria-current": is && "page" }, text))),
      ),
    ),
  );
  menu.hidden = groups.length === 0;
  const who =
    session.principal === null
      ? session.known &&
        h("span", { title: "auth.mode is none: whoever reaches the service may do everything" }, "No sign-in needed")
      : [
          h("span", {}, "Signed in as ", h("b", {}, session.principal)),
          h("button", { type: "button", class: "quiet", onclick: leave }, "Sign out"),
        ];
  fill(document.getElementById("who"), who);
  fill(
    document.getElementById("foot"),
    h("span", {}, ZONE === "UTC" ? "Times in UTC" : `Times in ${ZONE}; UTC in their titles`),
    session.ledger && h("span", { title: "the id of its root key" }, "Ledger ", h("code", {}, session.ledger)),
    h("a", { href: "docs" }, "API"),
    h("a", { href: "verify" }, "Verify a file offline"),
    h("span", { class: "printed" }),
  );
}

async function leave() {
  try {
    await signOut();
  } catch (error) {
    if (error.status !== 401) return void fail(error);
  }
  session = null;
  sessionStorage.clear();
  say("Signed out");
  location.hash === "#/" ? route() : location.assign("#/");
}

function closeMenu() {
  nav.classList.remove("open");
  menu.setAttribute("aria-expanded", "false");
}

// Its address would be taken for that of a page.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
menu.addEventListener("click", () => {
  menu.setAttribute("aria-expanded", String(nav.classList.toggle("open")));
});
signedOut.addEventListener("signed-out", () => {
  if (!session?.known || session.mode === "none") return;
  sessionStorage.setItem("wanted", location.hash);
  session = null;
  location.replace("#/sign-in/ended");
});
// Another tab may have signed in or out, for all of them.
document.addEventListener("visibilitychange", async () => {
  if (document.hidden || !session) return;
  const now = await currentSession().catch(() => session);
  if (now.principal !== session?.principal) location.reload();
});
// In the entry of the history that it is of, for who comes back to it.
window.addEventListener("scroll", () => {
  clearTimeout(scrolled);
  scrolled = setTimeout(() => history.replaceState({ top: window.scrollY }, ""), SCROLLED_AFTER_MS);
});
window.addEventListener("beforeprint", () => {
  const now = time(new Date().toISOString()).title;
  document.querySelector(".printed")?.replaceChildren(`Printed ${now} from ${location.href}`);
});
history.scrollRestoration = "manual";
window.addEventListener("hashchange", route);
route();
