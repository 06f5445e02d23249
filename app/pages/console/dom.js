// Elements by their names. Text is only ever text: nothing here, or in any page, makes markup out of it, and what would
// reorder or hide what stands around it shows as its code.

const SVG = "http://www.w3.org/2000/svg";
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const PRESSED_LOOK_MS = 50;
const later = new WeakMap(); // What is drawn once its place is not pressed any more, by place.

/** An element: `h("p", {class: "soft", onclick: f}, "text", child, null)`. Nulls and false are left out. */
export function h(name, given = {}, ...children) {
  return filled(document.createElement(name), given, children);
}

/** The same in SVG. */
export function svg(name, given = {}, ...children) {
  return filled(document.createElementNS(SVG, name), given, children);
}

function filled(element, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

function shown(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "string" ? child.replace(UNSEEN, coded) : child));
}

function coded(character) {
  return `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

/** What `element` holds from now on. */
export function fill(element, ...children) {
  clearTimeout(later.get(element));
  element.replaceChildren(...shown(children));
  return element;
}

/**
 * The same, of a place that is drawn again and again: where nothing changes nothing is touched, what was open stays open,
 * and what has the focus keeps it. While something there is pressed it waits, as what is replaced between a press and its
 * release is not clicked.
 */
export function refill(place, ...children) {
  if (place.matches(":active")) {
    clearTimeout(later.get(place));
    later.set(place, setTimeout(refill, PRESSED_LOOK_MS, place, ...children));
    return place;
  }
  const fresh = place.cloneNode(false);
  fill(fresh, ...children);
  const open = [...place.querySelectorAll("details")].map((each) => each.open);
  fresh.querySelectorAll("details").forEach((each, at) => {
    each.open ||= Boolean(open[at]);
  });
  if (fresh.isEqualNode(place)) return place;
  const held = place.querySelector(":focus");
  const alike = () => [...place.querySelectorAll(held.localName)];
  const before = held ? alike() : [];
  const scrolled = [...place.querySelectorAll("pre")].map((each) => each.scrollTop);
  fill(place, ...fresh.childNodes);
  place.querySelectorAll("pre").forEach((each, nth) => {
    each.scrollTop = scrolled[nth] ?? 0;
  });
  if (held) sameOf(held, before.indexOf(held), before.length, alike())?.focus({ preventScroll: true });
  return place;
}

/** Of `fresh` the one that `held`, the `at`-th of so many, is now: the same, else what is in its place. */
function sameOf(held, at, length, fresh) {
  const isSame = (each) =>
    each?.textContent === held.textContent &&
    ["href", "aria-label"].every((name) => each.getAttribute(name) === held.getAttribute(name));
  return [fresh[at], ...fresh].find(isSame) ?? (fresh.length === length ? fresh[at] : null);
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, title && h("h2", {}, title), children);
}

export function tag(text, kind = "") {
  return h("span", { class: `tag ${kind}` }, text);
}

/** Names and what is said of each, those left out of which nothing is. */
export function facts(pairs) {
  const said = Object.entries(pairs).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    said.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/**
 * A table. Columns are `{name, of: (row) => child, number?, minor?, heads?}`; `heads` is the column that names the row, minor
 * ones are not shown on a narrow screen. Roles are said, as that shows each row as a block, which else would be no table
 * to a screen reader.
 */
export function table(caption, columns, rows, options = {}) {
  const head = columns.map((column) =>
    h("th", { scope: "col", role: "columnheader", class: kindOf(column) }, column.name),
  );
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { role: "table" },
      h("caption", { class: options.unseen && "unseen" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
      h(
        "tbody",
        { role: "rowgroup" },
        rows.map((row) => tableRow(columns, row, options.kind?.(row))),
      ),
    ),
  );
}

export function tableRow(columns, row, kind) {
  const cells = columns.map((column) => {
    const given = { "data-label": column.name, class: kindOf(column) };
    const said = h("div", { class: "cell" }, column.of(row));
    return column.heads
      ? h("th", { scope: "row", role: "rowheader", ...given }, said)
      : h("td", { role: "cell", ...given }, said);
  });
  return h("tr", { role: "row", class: kind }, cells);
}

function kindOf(column) {
  return [column.number && "number", column.minor && "minor"].filter(Boolean).join(" ") || null;
}

/** A value of JSON, to be read. */
export function json(value) {
  return h("pre", { tabindex: "0", "aria-label": "JSON" }, JSON.stringify(value, null, 2));
}

/** A hash or a link, short, with all of it in its title. */
export function short(text, characters = 12) {
  if (text === null || text === undefined) return "none";
  return h(
    "code",
    { title: text, class: "nowrap" },
    text.length > characters + 1 ? `${text.slice(0, characters)}…` : text,
  );
}

const COUNTS = new Intl.NumberFormat();

export function count(number) {
  return COUNTS.format(number);
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** What is said while something is awaited. */
export function waiting(what) {
  return h("p", { class: "soft", "aria-busy": "true" }, `${what} …`);
}

/** A field of a form with its label. */
export function field(label, control, given = {}) {
  return h("label", given, label, control);
}
