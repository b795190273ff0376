// The runs, and one run: its worst trajectory, its curves, its steps.

import { get, link } from "./api.js";
import { STORY, curves } from "./curves.js";
import { h, number } from "./dom.js";
import { worstCard } from "./step.js";

const SHOWN_STEPS = 60;

export async function runs() {
  const found = await get("runs");
  if (found.runs.length === 1) return run({ run: found.runs[0].run });
  const rows = found.runs.map((r) =>
    h("tr", null,
      h("td", null, h("a", { class: "row", href: link("run", { run: r.run }) }, r.run)),
      h("td", { class: "num" }, number(r.steps)),
      h("td", { class: "num" }, number(r.reward)),
      h("td", { class: "num" }, number(r.accuracy)),
      h("td", { class: "num" }, number(r.stored_steps)),
      h("td", null, r.last_stored !== null &&
        h("a", { href: link("step", { run: r.run, step: r.last_stored, order: "worst" }) },
          `step ${r.last_stored}, worst first`))));
  return {
    title: found.root,
    live: true,
    where: [],
    content: [
      h("h1", null, `Runs in ${found.root}`),
      h("p", { class: "dim" }, "Open a run to see how it learned, and the worst thing that its policy did last."),
      h("div", { class: "card scroll" }, h("table", null,
        head("run", "#steps", "#reward", "#accuracy", "#stored steps", "look at"), h("tbody", null, rows))),
    ],
  };
}

export async function run({ run: name }) {
  const [{ steps, evaluation_of: of }, drawn, { runs: all }] = await Promise.all([
    get("steps", { run: name }),
    curves(name, STORY, { open: (step) => openNearest(name, step) }),
    get("runs"),
  ]);
  const evaluations = all.find((r) => r.run === name)?.evaluations ?? [];
  const last = steps.at(-1);
  const worst = last && await get("step", { run: name, step: last.step }).catch((error) => ({ problem: error.message }));
  const there = steps.map(({ step }) => step);
  const openNearest = (run, step) => {
    if (!there.length) return;
    const nearest = there.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    location.hash = link("step", { run, step: nearest });
  };
  return {
    title: name,
    live: true,
    where: of ? [h("a", { id: "up", href: link("run", { run: of }) }, of), h("span", null, kind(name))] : [h("span", null, name)],
    content: [
      h("h1", null, of ? `Evaluations of ${of}: ${kind(name)}` : name),
      worst?.problem && h("div", { class: "note bad", role: "alert" }, worst.problem),
      worst?.worst && worstCard(worst, `Worst trajectory of ${of ? "the evaluation after " : ""}step ${last.step}, the last one stored`),
      !steps.length && h("div", { class: "note" },
        "No trajectories are stored (store.enabled, store.keep_steps); there are only the curves."),
      drawn.drawings.length > 0 && section("Learning curves",
        "From metrics.jsonl. Click a curve to open the stored step next to that point.",
        h("div", { class: "curves" }, drawn.drawings), others(name, drawn.names)),
      evaluations.length > 0 && section("Evaluations", "What the policy did on held-out tasks.", evaluationTable(evaluations)),
      steps.length > 0 && section("Steps", `${steps.length} stored, the last first.`, stepTable(name, steps)),
    ].filter(Boolean),
  };
}

const chosen = {}; // metrics that were asked for beside the usual ones, by run: a page that is drawn again has them

// A drawing of any other metric, by name.
function others(run, names) {
  const box = h("div", { class: "curves" });
  const wanted = chosen[run] ??= [];
  const draw = async (names) => names.length && box.append(...(await curves(run, names)).drawings);
  draw(wanted);
  const left = Object.keys(names).filter((name) => !STORY.includes(name));
  const choice = h("select", { "aria-label": "another metric", onchange: async () => {
    if (choice.value && !wanted.includes(choice.value)) {
      wanted.push(choice.value);
      await draw([choice.value]);
    }
    choice.value = "";
    choice.blur();
  } }, h("option", { value: "" }, `another of ${left.length} metrics …`), left.map((n) => h("option", { value: n }, n)));
  return [box, h("p", null, choice)];
}

// What was evaluated: "training" for what a training run does every so many steps.
const kind = (name) => {
  const last = name.split("/").at(-1);
  return last === "training" ? "during training" : last.replace("_", ", ").replaceAll("_", " ");
};

function evaluationTable(evaluations) {
  const rows = evaluations.filter((e) => e.stored_steps).map((e) =>
    h("tr", null,
      h("td", null, h("a", { class: "row", href: link("run", { run: e.run }) }, kind(e.run))),
      h("td", { class: "num" }, number(e.stored_steps)),
      h("td", null, h("a", { href: link("step", { run: e.run, step: e.last_stored, order: "worst" }) },
        `after step ${e.last_stored}, worst first`))));
  return h("div", { class: "card scroll" }, h("table", null,
    head("policy", "#stored", "look at"), h("tbody", null, rows)));
}

function stepTable(run, steps) {
  const rows = steps.slice(-SHOWN_STEPS).reverse().map((s) =>
    h("tr", null,
      h("td", null, h("a", { class: "row", href: link("step", { run, step: s.step }) }, `step ${s.step}`)),
      h("td", { class: "num" }, number(s["reward/mean"])),
      h("td", { class: "num" }, number(s["rollout/accuracy"])),
      h("td", { class: "num" }, number(s["tools/use_rate"])),
      h("td", { class: "num" }, number(s["rollout/trajectories"])),
      h("td", null, h("a", { href: link("step", { run, step: s.step, order: "worst" }) }, "worst first")),
      h("td", null, s !== steps[0] && h("a", { href: link("compare", { run, a: steps[0].step, b: s.step }) },
        `beside step ${steps[0].step}`))));
  const choice = h("select", { "aria-label": "any step", onchange: () => {
    location.hash = link("step", { run, step: choice.value });
  } }, h("option", { value: "" }, "any step …"), steps.map((s) => h("option", { value: s.step }, s.step)));
  return [
    h("div", { class: "card scroll" }, h("table", null,
      head("step", "#reward", "#accuracy", "#tool use", "#trajectories", "", ""), h("tbody", null, rows))),
    steps.length > SHOWN_STEPS && h("p", null, choice),
  ];
}

export const section = (title, note, ...content) =>
  h("section", null, h("h2", null, title), note && h("p", { class: "dim" }, note), content);

// A table's head; names that begin with # are of numbers.
export const head = (...names) =>
  h("thead", null, h("tr", null, names.map((name) =>
    h("th", { class: name.startsWith("#") ? "num" : "" }, name.replace(/^#/, "")))));
