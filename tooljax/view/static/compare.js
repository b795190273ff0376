// Two steps side by side: what they came to, their trajectories under the same filters, and their metrics.

import { filters, get, link, replace } from "./api.js";
import { h, number, signed } from "./dom.js";
import { head, section } from "./run.js";
import { notes, table, tiles, worstCard } from "./step.js";
import { conversation, why } from "./trajectory.js";

export async function compare(parameters) {
  const { run, a, b } = parameters;
  const other = parameters.run_b || run;
  const sides = {};
  const told = (name) => (now) => {
    sides[name].table.take(now); // one set of filters for both
    replace("compare", { run, a, b, run_b: parameters.run_b, ...now });
  };
  [sides.a, sides.b] = await Promise.all([
    side(parameters, run, a, "a", told("b")), side(parameters, other, b, "b", told("a"))]);
  return {
    title: `steps ${a} and ${b} of ${run}`,
    where: [h("a", { id: "up", href: link("run", { run }) }, run), h("span", null, `steps ${a} and ${b}`)],
    content: [
      h("h1", null, "Two steps side by side"),
      h("div", { class: "pair" }, sides.a.content, sides.b.content),
      section("What the update reported", null, difference(sides.a.found, sides.b.found, a, b)),
    ],
  };
}

async function side(parameters, run, step, name, told) {
  const [found, { steps }, { runs }] = await Promise.all([get("step", { run, step }), get("steps", { run }), get("runs")]);
  const go = (changed) => { location.hash = link("compare", { ...parameters, ...changed }); };
  const choice = h("select", { "aria-label": "step", onchange: () => go({ [name]: choice.value }) },
    steps.map((s) => h("option", { value: s.step }, `step ${s.step}`)));
  choice.value = String(step);
  const which = h("select", { "aria-label": "run", onchange: () => change() },
    runs.filter((r) => r.stored_steps).map((r) => h("option", { value: r.run }, r.run)));
  which.value = run;
  const change = () => go({ [name === "a" ? "run" : "run_b"]: which.value,
    [name]: runs.find((r) => r.run === which.value).last_stored });
  const box = h("div", { class: "open" });
  const open = async (index) => {
    const view = await conversation({ ...filters(parameters), run, step, index });
    box.replaceChildren(
      h("div", { class: "headline" }, h("h3", null, `Task ${view.found.task_id}, sample ${view.found.sample}`),
        h("button", { type: "button", onclick: () => box.replaceChildren() }, "close")),
      why(view.found), ...view.content.filter(Boolean), view.panel);
    box.scrollIntoView({ block: "nearest" });
  };
  const list = await table(found, parameters, told, open);
  return {
    found,
    table: list,
    content: h("div", { class: "side" },
      h("div", { class: "headline" }, runs.length > 1 && which, choice),
      notes(found), tiles(found), found.worst && worstCard(found, "Worst trajectory", open), box, list),
  };
}

function difference(left, right, a, b) {
  const names = [...new Set([...Object.keys(left.update), ...Object.keys(right.update)])].sort();
  return h("div", { class: "card scroll" }, h("table", null, head("metric", `#step ${a}`, `#step ${b}`, "#change"),
    h("tbody", null, names.map((name) => {
      const [x, y] = [left.update[name], right.update[name]];
      const known = Number.isFinite(x) && Number.isFinite(y);
      return h("tr", null, h("td", null, name), h("td", { class: "num" }, number(x)), h("td", { class: "num" }, number(y)),
        h("td", { class: "num" }, known ? signed(y - x) : "–"));
    }))));
}
