// Tokens of a stream, each coloured by one of its numbers; greyed where the policy did not sample it.

import { get } from "./api.js";
import { h, number, visible } from "./dom.js";

const PAGE = 8192;
const FOLDED = 400; // tokens of a prompt or an observation that are shown before it is unfolded

export const COLOURS = {
  log_prob: { label: "log-prob", column: "rollout_log_prob", kind: "low", full: -5 },
  ratio: { label: "ratio", column: "ratio", kind: "ratio", least: 0.01 },
  advantage: { label: "advantage", column: "advantage", kind: "signed", least: 0.01 },
  entropy: { label: "entropy", column: "entropy", kind: "high", least: 0.1 },
  none: { label: "no colour" },
};
// Full colour is at one of these, so that a glance can compare trajectories; less than `least` is never full.
const NICE = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100, 1e3, 1e6];

// All tokens of a stream as columns.
export async function load(parameters, stream) {
  const { run, step, index } = parameters;
  let all = null;
  do {
    const part = await get("tokens", { run, step, index, stream, offset: all?.ids.length ?? 0, limit: PAGE });
    if (all === null) all = part;
    else for (const [name, column] of Object.entries(part)) {
      if (Array.isArray(column)) all[name] = all[name].concat(column);
    }
  } while (all.ids.length < all.total);
  return all;
}

// Spans of tokens [start, end).
export function spans(columns, stream, start, end, fold) {
  const make = (from, to) => {
    const made = [];
    for (let i = from; i < to; i++) {
      const text = columns.texts === null ? `${columns.ids[i]} ` : visible(columns.texts[i]);
      const span = document.createElement("span");
      span.className = columns.mask[i] ? "t" : "t masked";
      span.dataset.stream = stream;
      span.dataset.i = i;
      span.textContent = text;
      made.push(span);
    }
    return made;
  };
  const box = h("div", { class: columns.texts === null ? "tokens ids" : "tokens" });
  const cut = fold && end - start > FOLDED + 100 ? start + FOLDED : end;
  box.append(...make(start, cut));
  if (cut < end) {
    const more = h("button", { type: "button", onclick: () => more.replaceWith(...make(cut, end)) },
      `… ${end - cut} more tokens`);
    box.append(more);
  }
  return box;
}

// Colours every token below `root`; the scale is one for all of them. Returns the legend.
export function paint(root, streams, name) {
  const { column, kind, full, least, label } = COLOURS[name] ?? COLOURS.none;
  const strength = { low: (v) => -v, high: (v) => v, ratio: Math.log, signed: (v) => v }[kind];
  const values = streams.flatMap((s) => s?.[column] ?? []).filter((v) => v !== null);
  const most = Math.max(least ?? 0, ...sample(values).map((v) => Math.abs(strength(v))));
  const scale = full ? -full : NICE.find((nice) => nice >= most) ?? most;
  for (const span of root.querySelectorAll(".t:not(.masked)")) {
    const value = strength && streams[span.dataset.stream][column]?.[span.dataset.i];
    span.style.backgroundColor = value === undefined || value === null || !strength ? "" : colour(strength(value) / scale, kind);
  }
  if (!strength) return [];
  if (!values.length) return [h("span", { class: "dim" }, `This trajectory has no ${label}: it was not in the loss.`)];
  const ends = {
    low: [["0", 0], ["−2.5", 0.5], ["−5 or less", 1]],
    high: [["0", 0], [number(scale), 1]],
    ratio: [[number(Math.exp(-scale)), -1], ["1", 0], [number(Math.exp(scale)), 1]],
    signed: [[number(-scale), -1], ["0", 0], [`+${number(scale)}`, 1]],
  }[kind];
  return ends.map(([text, at]) => {
    const patch = h("span", { class: "patch" }, text);
    patch.style.backgroundColor = colour(at, kind);
    return patch;
  });
}

function colour(share, kind) {
  const up = share > 0 && kind !== "low";
  const part = Math.round(85 * Math.min(1, Math.abs(share)));
  return `color-mix(in srgb, var(${up ? "--above" : "--below"}) ${part}%, transparent)`;
}

// At most 50,000 of the values: a spread of more does not fit into one call.
function sample(values) {
  const every = Math.ceil(values.length / 50000);
  return every > 1 ? values.filter((_, i) => i % every === 0) : values;
}

// What the numbers of one token are, for the panel beside the conversation.
export function details(columns, i) {
  const value = (name) => columns[name]?.[i];
  const rows = [
    ["token", columns.texts === null ? "(no tokenizer)" : JSON.stringify(visible(columns.texts[i]))],
    ["id, place", `${columns.ids[i]}, ${i}`],
  ];
  if (!columns.mask[i]) return [...rows, ["loss mask", "0: not sampled by the policy"]];
  return [
    ...rows,
    ["rollout log-prob", number(value("rollout_log_prob"))],
    ["trainer log-prob", number(value("trainer_log_prob"))],
    ["ratio", digits(value("ratio"))],
    ["advantage", number(value("advantage"))],
    ["reference log-prob", number(value("ref_log_prob"))],
    ["entropy", number(value("entropy"))],
  ];
}

// Ratios are all near 1: what matters is behind the third digit.
const digits = (value) => (value === null || value === undefined ? "–" : value.toPrecision(7));
