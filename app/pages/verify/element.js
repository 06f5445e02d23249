// Elements of the page, made one by one: nothing that stands in a file is ever read as markup.

/** An element with attributes and children; null children are left out, texts stay texts. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** A drawing of 24 by 24 in lines, which says nothing that the text beside it does not. */
export function icon(path) {
  const made = document.createElementNS(SVG, "svg");
  made.setAttribute("viewBox", "0 0 24 24");
  made.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  for (const [name, value] of Object.entries({
    d: path,
    fill: "none",
    stroke: "currentColor",
    "stroke-width": "1.8",
  })) {
    line.setAttribute(name, value);
  }
  made.append(line);
  return made;
}

/** A text on one line, whatever stands in it: what cannot be seen becomes a mark. */
export function plain(text, charactersMax = 2000) {
  const characters = [...String(text)];
  const shown = characters.slice(0, charactersMax).join("");
  const marked = shown.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, "�");
  return characters.length > charactersMax ? `${marked}… (${characters.length} characters)` : marked;
}

export function counted(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** A time of an HLC, in UTC. */
export function timeOfMs(ms) {
  const time = new Date(Number(ms));
  return Number.isNaN(time.getTime()) ? plain(ms) : time.toISOString().replace("T", " ").replace("Z", " UTC");
}

export function code(text, className = null) {
  return element("code", { class: className }, plain(text));
}
