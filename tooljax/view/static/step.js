// One step: what it came to, its worst trajectory, and the table of all of them with filters.

import { FILTERS, filters, get, link, replace } from "./api.js";
import { badge, h, number, percent, signed, statusBadge } from "./dom.js";

const PAGE = 100;

export async function step(parameters) {
  const { run, step: at } = parameters;
  const [found, { steps }] = await Promise.all([get("step", { run, step: at }), get("steps", { run })]);
  const order = steps.map((s) => s.step), place = order.indexOf(found.step);
  const other = order[place ? 0 : order.length - 1];
  const list = await table(found, parameters, (now) => replace("step", { run, step: at, ...now }));
  return {
    title: `step ${at} of ${run}`,
    where: [h("a", { id: "up", href: link("run", { run }) }, run), h("span", null, `step ${at}`)],
    content: [
      h("div", { class: "headline" },
        h("h1", null, `Step ${at}`),
        h("span", { class: "pager" },
          turn("previous", "←", order[place - 1], run, parameters),
          turn("next", "→", order[place + 1], run, parameters)),
        other !== found.step && h("a", { href: link("compare", { run, a: Math.min(at, other), b: Math.max(at, other) }) },
          `side by side with step ${other}`)),
      ...notes(found),
      tiles(found),
      found.worst && worstCard(found, "Worst trajectory"),
      list,
      h("details", { class: "card" }, h("summary", null, "Settings and update of this step"),
        h("div", { class: "cols" },
          h("pre", null, found.config),
          h("pre", null, Object.entries(found.update).map(([k, v]) => `${k} = ${number(v)}`).join("\n")))),
    ].filter(Boolean),
  };
}

function turn(id, arrow, step, run, parameters) {
  return step === undefined
    ? h("span", { class: "button off" }, arrow)
    : h("a", { id, class: "button", title: `step ${step}`, href: link("step", { run, step, ...filters(parameters) }) }, arrow);
}

export const notes = (found) =>
  found.notes.map((note) =>
    h("div", { class: "note bad", role: "alert" }, h("b", null, "Part of this step is lost. "), note,
      ". If the run is still writing it, load the page again in a moment."));

export function tiles(found) {
  const all = found.trajectories;
  const tile = (value, label) => h("div", { class: "tile" }, h("b", null, value), h("span", null, label));
  return h("div", { class: "tiles" },
    tile(all, "trajectories"),
    tile(number(found.reward_mean), `mean reward, from ${number(found.reward_min)} to ${number(found.reward_max)}`),
    tile(percent(found.correct, all), "correct"),
    tile(percent(found.with_failed_calls, all), "with a failed tool call"),
    tile(percent(found.trained_on, all), "trained on"));
}

export function worstCard(found, title, open) {
  const { worst } = found;
  const here = (event) => { if (open) { event.preventDefault(); open(worst.index); } };
  const href = link("trajectory", { run: found.run, step: found.step, index: worst.index, order: "worst" });
  return h("a", { class: `card worst ${worst.correct ? "fine" : ""}`, href, onclick: here },
    h("span", { class: "title" }, title),
    h("span", { class: "why" }, worst.why),
    h("span", { class: "go" }, "Open this conversation →"));
}

// The filters and the list below them. `told` is called with the filters when they change; the element's `take` sets
// them.
export async function table(found, parameters, told, open) {
  let now = { order: "worst", ...filters(parameters) }, offset = 0, asked = 0;
  const body = h("div", null);
  const fill = async () => {
    const mine = ++asked;
    let answer;
    try {
      answer = await get("trajectories", { run: found.run, step: found.step, ...now, offset, limit: PAGE });
    } catch (error) {
      body.replaceChildren(h("div", { class: "note bad", role: "alert" }, error.message));
      return;
    }
    if (mine === asked) body.replaceChildren(...list(found, answer, now, open, (to) => { offset = to; fill(); }));
  };
  const section = h("section", null, h("h2", null, "Trajectories"), h("form"), body);
  section.take = (changed) => {
    now = changed;
    offset = 0;
    section.querySelector("form").replaceWith(form());
    return fill();
  };
  const form = () => filterForm(found, now, (changed) => {
    told?.(changed);
    return section.take(changed);
  });
  await section.take(now);
  return section;
}

function filterForm(found, now, change) {
  const controls = {};
  const changed = () => change(Object.fromEntries(
    FILTERS.map((name) => [name, controls[name]?.value ?? ""]).filter(([, value]) => value !== "")));
  const choice = (name, label, known) => {
    const value = now[name] ?? known[0][0];
    const options = known.some(([v]) => v === value) ? known : [...known, [value, `${value} (0)`]];
    controls[name] = h("select", { name, onchange: changed },
      options.map(([value, text]) => h("option", { value }, text)));
    controls[name].value = value;
    return h("label", null, label, controls[name]);
  };
  const input = (name, label, type, size) => {
    controls[name] = h("input", { name, type, size, step: "any", value: now[name] ?? "", onchange: changed });
    return h("label", null, label, controls[name]);
  };
  const counted = (kind) => Object.entries(found.counts[kind]).map(([k, n]) => [k, `${k} (${n})`]);
  const only = (kind, all, none) => [["", "all"], ["any", all], ["none", none], ...counted(kind)];
  controls.group = h("input", { type: "hidden", value: now.group ?? "" });
  return h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); changed(); } },
    choice("order", "order", [["worst", "worst first"], ["best", "best first"], ["stored", "as stored"]]),
    choice("status", "ended by", [["", "all"], ...counted("status")]),
    choice("tool", "tool", [["", "all"], ...counted("tool")]),
    choice("error", "tool error", only("error", "any error", "no error")),
    choice("dropped", "left out", only("dropped", "left out", "trained on")),
    input("min_reward", "reward from", "number"), input("max_reward", "to", "number"),
    input("text", "text", "search", 18),
    now.group && h("span", null, `group ${now.group} only `),
    h("button", { type: "button", onclick: () => {
      for (const control of Object.values(controls)) control.value = "";
      controls.order.value = "worst";
      changed();
    } }, "reset"));
}

function* list(found, { total, offset, rows }, now, open, go) {
  const last = offset + rows.length;
  yield h("div", { class: "headline" },
    h("span", { class: "dim total" }, total ? `${offset + 1} to ${last} of ${total}` : "Nothing fits these filters."),
    offset > 0 && h("button", { type: "button", onclick: () => go(Math.max(0, offset - PAGE)) }, "← earlier"),
    last < total && h("button", { type: "button", onclick: () => go(last) }, "more →"));
  if (!total) return;
  const lines = rows.map((row) => {
    const href = link("trajectory", { run: found.run, step: found.step, index: row.index, ...now });
    const here = (event) => { if (open) { event.preventDefault(); open(row.index); } };
    return h("a", { class: "row line", href, onclick: here },
      h("span", { class: `num reward ${row.correct ? "good" : "bad"}` }, number(row.reward)),
      h("span", null, statusBadge(row.status), row.dropped && found.trained_on > 0 && badge("left out", "dim")),
      h("span", { class: "why", title: row.why + (row.dropped && ` Left out: ${row.dropped}.`) }, row.why),
      h("span", { class: "num" }, row.turns),
      h("span", { class: "num" }, row.failed_calls ? `${row.failed_calls} of ${row.calls} failed` : row.calls),
      h("span", { class: "num" }, row.tokens),
      h("span", { class: "num" }, signed(row.advantage)),
      h("span", { class: "num dim" }, row.task_id, " #", row.sample));
  });
  yield h("div", { class: "card list scroll" },
    h("div", { class: "line head" },
      h("span", { class: "num" }, "reward"), h("span", null, "ended by"), h("span", null, "why"),
      h("span", { class: "num" }, "turns"), h("span", { class: "num" }, "calls"), h("span", { class: "num" }, "tokens"),
      h("span", { class: "num" }, "advantage"), h("span", { class: "num" }, "task")),
    lines);
}
