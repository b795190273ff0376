// Learning curves as SVG, one small drawing a metric.

import { get } from "./api.js";
import { h, number, svg } from "./dom.js";

const WIDTH = 300, HEIGHT = 110, LEFT = 48, RIGHT = 8, TOP = 8, BOTTOM = 18;

export const STORY = [
  "reward/mean", "rollout/accuracy", "eval/accuracy", "tools/use_rate", "tools/valid_call_rate",
  "rollout/turns/mean", "rollout/completion_tokens/mean", "rollout/truncated_frac",
  "reward/zero_variance_group_frac", "policy/entropy", "policy/kl_mismatch", "optim/grad_norm",
  "time/step_s",
];

// Drawings of those of the metrics that the run has; `mark` is a step to point out.
export async function curves(run, names, { mark, open } = {}) {
  const found = await get("metrics", { run, names: names.join(","), points: 300 });
  const drawn = names.filter((name) => found.curves[name]?.length);
  return {
    names: found.names,
    drawings: drawn.map((name) => drawing(name, found.curves[name], found.names[name], mark, open)),
  };
}

function drawing(name, points, { meaning, unit }, mark, open) {
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const [x0, x1] = range(xs), [y0, y1] = range(ys);
  const x = (v) => LEFT + ((v - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const line = (values) => values.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  const many = points.length >= 40;
  const label = h("span", { class: "value" }, number(ys.at(-1)));
  const dot = svg("circle", { class: "dot", r: 3, cx: x(xs.at(-1)), cy: y(ys.at(-1)) });
  const marked = mark !== undefined && mark >= x0 && mark <= x1;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name },
    [y0, (y0 + y1) / 2, y1].map((v) => [
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }),
      svg("text", { class: "tick", x: LEFT - 5, y: y(v) + 3, "text-anchor": "end" }, number(v)),
    ]),
    svg("text", { class: "tick", x: LEFT, y: HEIGHT - 4 }, number(xs[0])),
    svg("text", { class: "tick", x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, number(xs.at(-1))),
    marked && svg("line", { class: "mark", x1: x(mark), x2: x(mark), y1: TOP, y2: HEIGHT - BOTTOM }),
    svg("polyline", { class: many ? "line faint" : "line", points: line(points) }),
    many && svg("polyline", { class: "line", points: line(smoothed(points)) }),
    dot);
  const point = (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    return points.reduce((a, b) => (Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a));
  };
  const tell = ([step, value]) => {
    label.textContent = `step ${Math.round(step)}: ${number(value)}`;
    dot.setAttribute("cx", x(step));
    dot.setAttribute("cy", y(value));
  };
  picture.addEventListener("mousemove", (event) => tell(point(event)));
  picture.addEventListener("mouseleave", () => {
    tell(points.at(-1));
    label.textContent = number(ys.at(-1));
  });
  if (open) {
    picture.classList.add("opens");
    picture.addEventListener("click", (event) => open(Math.round(point(event)[0])));
  }
  return h("figure", { title: meaning + (unit && ` In ${unit}.`) },
    h("figcaption", null, h("span", null, name), label), picture);
}

function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : [low, high];
}

// Each value averaged with up to nine before it: the line never knows the future.
function smoothed(points) {
  return points.map(([x], i) => {
    const window = points.slice(Math.max(0, i - 9), i + 1);
    return [x, window.reduce((sum, [, y]) => sum + y, 0) / window.length];
  });
}
