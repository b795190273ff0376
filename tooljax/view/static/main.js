// Shows the page that the address names; keys and theme.

import { get, link, place } from "./api.js";
import { compare } from "./compare.js";
import { h } from "./dom.js";
import { run, runs } from "./run.js";
import { step } from "./step.js";
import { trajectory } from "./trajectory.js";

const PAGES = { "": runs, run, step, trajectory, compare };

const LOOK_MS = 2000; // how often it is asked what is new

let shown = 0; // an answer that comes after the next question is thrown away
let known = null; // what there was when the page was made, and what to do about news

async function show() {
  const mine = ++shown;
  known = null;
  const { page, parameters } = place();
  const main = document.getElementById("page");
  const where = document.getElementById("where");
  try {
    const before = PAGES[page] === compare ? null : await news(parameters.run);
    const made = await (PAGES[page] ?? runs)(parameters);
    if (mine !== shown) return;
    known = before && { ...before, run: parameters.run, redraw: made.live };
    main.replaceChildren(...made.content);
    where.replaceChildren(...made.where.flatMap((part) => [h("span", { class: "sep" }, "›"), part]));
    document.title = `${made.title} · tooljax view`;
    main.dataset.ready = location.hash || "#/";
  } catch (error) {
    if (mine !== shown) return;
    main.replaceChildren(
      h("div", { class: "note bad", role: "alert" }, h("b", null, "This cannot be shown. "), error.message),
      h("p", null, h("a", { href: "#/" }, "All runs")),
    );
    main.dataset.ready = location.hash || "#/";
  }
}

// What there is of a run, or of all of them: its last stored step, and all that changes as it goes on.
async function news(run) {
  const found = (await get("runs")).runs;
  const all = found.flatMap((r) => [r, ...r.evaluations]);
  const one = all.find((r) => r.run === run);
  return { last: one?.last_stored, mark: JSON.stringify(one ?? found) };
}

// A page of a run, or of runs, follows what is new; elsewhere a link says that there is something.
async function look() {
  const mine = shown, before = known;
  if (!before || document.hidden) return;
  const now = await news(before.run).catch(() => before); // the server may be gone, and come back
  if (mine !== shown || now.mark === before.mark) return;
  if (!before.redraw) {
    const more = document.getElementById("news");
    more.replaceChildren(...(now.last > before.last ? [newer(before.run, now.last)] : []));
  } else if (!document.querySelector("main :is(select, input):focus")) {
    const [at, focused] = [scrollY, document.activeElement?.getAttribute("href")];
    await show();
    scrollTo(0, at);
    [...document.querySelectorAll("main a")].find((a) => a.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }
}

const newer = (run, step) =>
  h("a", { href: link("step", { run, step, order: "worst" }) }, `new: step ${step}`);

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    document.getElementById(event.key === "ArrowLeft" ? "previous" : "next")?.click();
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const near = document.activeElement.closest(".list, table") ?? document.querySelector(".list");
    const rows = [...(near?.querySelectorAll("a.row") ?? [])];
    const at = rows.indexOf(document.activeElement);
    if (!rows.length || (at < 0 && event.target !== document.body)) return;
    rows[Math.max(0, Math.min(rows.length - 1, at + (event.key === "ArrowDown" ? 1 : -1)))].focus();
  } else if (event.key === "Escape") {
    document.getElementById("up")?.click();
  } else return;
  event.preventDefault();
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
}

const kept = localStorage.getItem("theme");
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
document.getElementById("theme").addEventListener("click", theme);
document.addEventListener("keydown", keys);
addEventListener("hashchange", () => {
  scrollTo(0, 0);
  document.getElementById("news").replaceChildren();
  show();
});
show();
setInterval(look, LOOK_MS);
