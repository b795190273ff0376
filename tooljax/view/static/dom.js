// Elements from plain values. Texts become text nodes, never markup: nothing here, or on the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";
// Controls, and the marks that turn the direction of text around, which could make a line read as another one.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

export function visible(text) {
  return String(text).replace(INVISIBLE, (c) => `⟨${c.codePointAt(0).toString(16).toUpperCase()}⟩`);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// A number as people read it: at most four digits that say something.
export function number(value, none = "–") {
  if (value === null || value === undefined) return none;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1);
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 3)));
}

export const signed = (value) => (value > 0 ? "+" : "") + number(value);

export function seconds(value) {
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  return value < 1 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export const json = (value) =>
  typeof value === "string" ? value : JSON.stringify(value, null, 1);

export function badge(text, kind) {
  return h("span", { class: `badge ${kind}` }, text);
}

export const statusBadge = (status) =>
  badge(status, { completed: "plain", aborted: "plain" }[status] ?? "bad");
