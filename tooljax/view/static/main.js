// Shows the page that the address names; keys and theme.

import { place } from "./api.js";
import { compare } from "./compare.js";
import { h } from "./dom.js";
import { run, runs } from "./run.js";
import { step } from "./step.js";
import { trajectory } from "./trajectory.js";

const PAGES = { "": runs, run, step, trajectory, compare };

let shown = 0; // an answer that comes after the next question is thrown away

async function show() {
  const mine = ++shown;
  const { page, parameters } = place();
  const main = document.getElementById("page");
  const where = document.getElementById("where");
  try {
    const made = await (PAGES[page] ?? runs)(parameters);
    if (mine !== shown) return;
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
  show();
});
show();
