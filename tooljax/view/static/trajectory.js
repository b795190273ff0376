// One trajectory: why it ended as it did, the conversation token by token, and what was made of it.

import { filters, get, link, place, replace } from "./api.js";
import { curves } from "./curves.js";
import { badge, h, json, number, seconds, signed, statusBadge } from "./dom.js";
import { COLOURS, details, load, paint, spans } from "./tokens.js";

export async function trajectory(parameters) {
  const { run, step } = parameters;
  const [view, drawn] = await Promise.all([
    conversation(parameters, (colour) => replace("trajectory", { ...place().parameters, colour })),
    curves(run, ["reward/mean", "rollout/accuracy", "tools/valid_call_rate"], { mark: Number(step) }),
  ]);
  const { found } = view, list = filters(parameters);
  const turn = (id, arrow, index, title) => index === null
    ? h("span", { class: "button off" }, arrow)
    : h("a", { id, class: "button", title, href: link("trajectory", { ...parameters, index }) }, arrow);
  const position = found.list.position === null
    ? "not in this list"
    : `${found.list.position + 1} of ${found.list.total}${{ worst: ", worst first", best: ", best first" }[list.order] ?? ""}`;
  return {
    title: `${found.task_id} #${found.sample}`,
    where: [
      h("a", { href: link("run", { run }) }, run),
      h("a", { id: "up", href: link("step", { run, step, ...list }) }, `step ${step}`),
      h("span", null, `${found.task_id} #${found.sample}`),
    ],
    content: [
      h("div", { class: "headline" },
        h("h1", null, `Task ${found.task_id}, sample ${found.sample}`),
        h("span", { class: "pager" },
          turn("previous", "←", found.list.previous, "the one before (arrow left)"),
          h("span", { class: "dim" }, position),
          turn("next", "→", found.list.next, "the next one (arrow right)"))),
      why(found),
      h("div", { class: "split" },
        h("div", null, view.content),
        h("aside", null, view.panel, facts(found, parameters),
          drawn.drawings.length > 0 && h("div", { class: "card" }, h("h3", null, "Curves, this step marked"), drawn.drawings))),
    ],
  };
}

export const why = (found) =>
  h("div", { id: "why", class: `note ${found.correct ? "good" : "bad"}` }, statusBadge(found.status), " ", found.why);

// The conversation, and the panel that tells of one token. `told` is called with the colour when it is chosen.
export async function conversation(parameters, told) {
  const found = await get("trajectory", {
    run: parameters.run, step: parameters.step, index: parameters.index, ...filters(parameters),
  });
  const streams = await Promise.all(found.streams.map((_, i) => load(parameters, i)));
  const body = h("div", { class: "conversation" }, found.streams.map((stream, i) => [
    found.streams.length > 1 && h("h3", null, `Token stream ${i + 1} of ${found.streams.length}`),
    stream.segments.map((segment) => part(found, streams[i], i, segment)),
  ]));
  const legend = h("span", { class: "legend" });
  const choose = (name) => legend.replaceChildren(...paint(body, streams, name));
  const chosen = COLOURS[parameters.colour] ? parameters.colour : "log_prob";
  const bar = h("div", { class: "colours", role: "radiogroup", "aria-label": "colour of tokens" },
    h("span", { class: "dim" }, "Colour by"),
    Object.entries(COLOURS).map(([name, { label }]) => h("label", null,
      h("input", { type: "radio", name: `colour-${parameters.step}-${parameters.index}`, value: name, checked: name === chosen,
        onchange: () => { choose(name); told?.(name); } }), label)),
    legend);
  choose(chosen);
  const panel = tokenPanel(body, streams);
  return {
    found,
    panel,
    content: [
      found.tokenizer_problem && h("div", { class: "note" }, found.tokenizer_problem, "."),
      bar,
      body,
      h("details", { class: "card", open: Boolean(found.tokenizer_problem) },
        h("summary", null, "The messages as text"), found.messages.map(message)),
    ],
  };
}

function part(found, columns, stream, { kind, start, end, turn }) {
  const count = end - start;
  if (kind !== "turn") {
    const label = kind === "prompt" ? "prompt" : "tool or user";
    return h("div", { class: `part ${kind}` },
      h("div", { class: "who" }, label, h("span", { class: "dim" }, `${count} tokens, not trained on`)),
      spans(columns, stream, start, end, true));
  }
  const made = found.turns[turn];
  return h("div", { class: "part turn" },
    h("div", { class: "who" }, `turn ${turn + 1}`, h("span", { class: "dim" },
      `policy version ${made.versions.join(", ")} · ${count} tokens in ${seconds(made.generate_s)}`,
      made.cached_tokens > 0 && ` · ${made.cached_tokens} cached`,
      made.finish !== "stop" && ` · ended by ${made.finish}`)),
    spans(columns, stream, start, end, false),
    made.calls.map(call),
    made.reply && h("div", { class: "call" }, "interaction: ", made.reply.text,
      h("span", { class: "dim" }, ` score ${number(made.reply.score)}, ${seconds(made.reply.latency_s)}`,
        made.reply.done && ", ended the conversation")));
}

function call(c) {
  const failed = c.status !== "ok";
  const shown = typeof c.arguments === "object" && c.arguments !== null
    ? Object.entries(c.arguments).map(([k, v]) => `${k}=${JSON.stringify(v)}`).join(", ")
    : json(c.arguments ?? c.raw);
  return h("details", { class: failed ? "call failed" : "call" },
    h("summary", null,
      h("b", null, c.name || "unreadable call"), h("code", null, `(${short(shown)})`),
      badge(c.status, failed ? "bad" : "good"), h("span", { class: "dim" }, seconds(c.latency_s)),
      h("span", { class: "result" }, "→ ", short(c.result))),
    h("dl", null,
      entry("arguments", h("pre", null, json(c.arguments ?? null))),
      entry("as written", h("pre", null, c.raw)),
      entry(failed ? "error" : "result", h("pre", null, c.result)),
      entry("time", `${seconds(c.latency_s)} in the tool, ${seconds(c.queue_s)} waiting, ${c.attempts} attempt${c.attempts === 1 ? "" : "s"}`),
      entry("result tokens", `${c.result_tokens}${c.truncated ? ", shortened" : ""}`),
      c.reward !== 0 && entry("reward of the tool", number(c.reward)),
      Object.entries(c.metrics).map(([k, v]) => entry(k, number(v)))));
}

const short = (text) => (text.length > 140 ? `${text.slice(0, 139)}…` : text).replace(/\s+/g, " ");

const entry = (name, value) => [h("dt", null, name), h("dd", null, value)];

function message(m) {
  const { role, content, ...rest } = m;
  return h("div", { class: "part" }, h("div", { class: "who" }, role),
    h("pre", null, json(content ?? "")), Object.keys(rest).length > 0 && h("pre", { class: "dim" }, json(rest)));
}

function facts(found, { run, step, index, ...list }) {
  const terms = Object.entries(found.reward_terms).map(([k, v]) => entry(k, signed(v)));
  const others = found.group_members.map((m) =>
    h("a", { class: `chip ${m.correct ? "good" : "bad"} ${m.index === found.index ? "here" : ""}`, title: `sample ${m.sample}`,
      href: link("trajectory", { run, step, ...list, index: m.index }) }, number(m.reward)));
  return h("div", { class: "card" },
    h("h3", null, `Reward ${number(found.reward, "none")}`),
    h("dl", null, terms,
      entry("advantage", signed(found.advantage)),
      entry("trained on", found.dropped ? `no: ${found.dropped}` : "yes"),
      found.ground_truth !== null && entry("expected", h("pre", null, json(found.ground_truth))),
      Object.entries(found.metrics).map(([k, v]) => entry(k, number(v))),
      entry("ended by", `${found.status}: ${found.meaning}${found.settings && ` (${found.settings})`}`),
      found.error && entry("error", h("pre", null, found.error)),
      entry("time", `${seconds(found.total_s)}, of that ${seconds(found.tool_s)} in tools`),
      found.data_source && entry("data", found.data_source),
      found.escaped_special_tokens > 0 && entry("escaped", `${found.escaped_special_tokens} special-token texts`),
      entry("seed", found.seed)),
    h("h3", null, "Its group"),
    h("div", { class: "chips" }, others));
}

// Tells of the token under the mouse; a click keeps it.
function tokenPanel(body, streams) {
  const box = h("div", { class: "card token" });
  const rest = () => box.replaceChildren(h("h3", null, "Token"), h("p", { class: "dim" }, "Point at a token; click to keep it."));
  let kept = null;
  const tell = (span) => box.replaceChildren(h("h3", null, kept ? "Token (kept)" : "Token"),
    h("dl", null, details(streams[span.dataset.stream], Number(span.dataset.i)).map(([k, v]) => entry(k, v))));
  body.addEventListener("mouseover", ({ target }) => {
    if (!kept && target.matches(".t")) tell(target);
  });
  body.addEventListener("click", ({ target }) => {
    if (!target.matches(".t")) return;
    kept?.classList.remove("kept");
    kept = kept === target ? null : target;
    kept?.classList.add("kept");
    tell(target);
  });
  rest();
  return box;
}
