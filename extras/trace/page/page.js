"use strict";

// All text goes into the page as text nodes.

const $ = (id) => document.getElementById(id);
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const mean = (xs) => sum(xs) / xs.length;
const PALETTE = ["#3b7dbf", "#d9772b", "#4d9c5a", "#9a6bb5", "#b5555a", "#85857c", "#3a9a9a", "#c0a030"];

const data = JSON.parse($("data").textContent);
const state = { run: 0, step: Infinity, group: null };
const shown = { trace: null, group: null, metrics: new Set(data.main), charts: [] };
const cache = new Map();
const run = () => data.runs[state.run];

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function number(x, digits = 4) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (typeof x !== "number") return String(x);
  const plain = x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6);
  return plain ? String(Number(x.toPrecision(digits))) : x.toExponential(digits - 1).replace(/\.?0+e/, "e");
}

function options(select, values, chosen) {
  select.replaceChildren(...values.map(([value, text]) => el("option", { value }, text)));
  if (values.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

// ---- traces ----

const nearest = (traces, step) => [...traces].sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];

/** Return a promise of the trace of a step: its groups. The page keeps the last few. */
function load(r, trace) {
  const key = `${r} ${trace.step}`;
  if (!cache.has(key)) cache.set(key, read(trace));
  if (cache.size > 6) cache.delete(cache.keys().next().value);
  return cache.get(key);
}

async function read({ step, gzip }) {
  const bytes = Uint8Array.from(atob(gzip), (x) => x.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const groups = text.trimEnd().split("\n").slice(1).map((line) => JSON.parse(line));
  const images = groups.flatMap((group) => group.completions.flatMap((c) => c.images ?? []));
  for (const image of images) Object.assign(image, data.pictures[image.digest]);
  return { step, groups };
}

/** Return the streams of a completion in an update by name; the first ones have readable names. */
function streams(completion, update) {
  const { old_logprobs: old = completion.updates[0].logprobs, ...known } = { ...completion.fixed, ...update };
  const minus = (xs, ys) => xs && ys && xs.map((x, t) => (x === null || ys[t] === null ? null : x - ys[t]));
  const { advantages, ratio, entropy, kl, share, logprobs, logprobs_gradient, ...others } = known;
  const everywhere = completion.advantage !== undefined && completion.mask.map(() => completion.advantage);
  const named = { advantage: advantages ?? everywhere, ratio, "engine gap": minus(known.rollout_logprobs, old), entropy,
    "KL to the reference": kl ?? minus(logprobs, known.ref_logprobs), "loss share": share,
    gradient: logprobs_gradient ?? known.value_gradient, "log-prob": logprobs,
    old_logprobs: completion.fixed.old_logprobs, ...others };
  return Object.fromEntries(Object.entries(named).filter(([, xs]) => Array.isArray(xs)));
}

/** Return the update of a completion that the page shows; undefined if it has no part in it. */
const updateOf = (completion) => completion.updates.find((x) => String(x.update) === $("update").value);
const streamsOf = (completion) => (updateOf(completion) ? streams(completion, updateOf(completion)) : {});

// ---- left: curves ----

function drawCharts() {
  const css = getComputedStyle(document.documentElement);
  const [dim, line, ink] = ["--dim", "--line", "--ink"].map((name) => css.getPropertyValue(name).trim());
  shown.charts.forEach((chart) => chart.destroy());
  $("charts").replaceChildren();
  const width = Math.max(200, $("curves").clientWidth - 28);
  const axis = { stroke: dim, grid: { stroke: line, width: 0.5 }, ticks: { show: false }, font: "11px system-ui" };
  const y = { ...axis, size: 52, space: 24, values: (u, ticks) => ticks.map((x) => number(x, 3)) };
  shown.charts = [...shown.metrics].map((name) => {
    const lines = data.runs.flatMap((x, r) => (x.metrics[name] ? [{ r, columns: x.metrics[name] }] : []));
    const series = lines.map(({ r, columns }) => ({ stroke: PALETTE[r % PALETTE.length], width: 1.5, spanGaps: true,
      points: { show: columns[0].length < 30, size: 4 } }));
    const title = el("span");
    const holder = el("div", { class: "chart" }, el("div", { class: "title" }, el("span", null, name), title));
    $("charts").append(holder);
    const mark = (u) => {
      u.ctx.fillStyle = ink;
      u.ctx.fillRect(u.valToPos(state.step, "x", true), u.bbox.top, devicePixelRatio, u.bbox.height);
    };
    const chart = new uPlot({ width, height: 110, series: [{}, ...series], cursor: { sync: { key: "step" }, y: false },
      scales: { x: { time: false } }, hooks: { draw: [mark] }, legend: { show: false }, axes: [{ ...axis, size: 22 }, y] },
    uPlot.join(lines.map((x) => x.columns)), holder);
    chart.over.addEventListener("click", () => setStep(Math.round(chart.posToVal(chart.cursor.left, "x"))));
    chart.title = () => {
      title.textContent = lines.map(({ columns: [steps, xs] }) => number(xs[steps.indexOf(state.step)])).join("  ");
    };
    chart.title();
    return chart;
  });
  $("labels").replaceChildren(...(data.runs.length > 1 ? data.runs : []).map(({ name }, r) => {
    const swatch = el("i");
    swatch.style.backgroundColor = PALETTE[r % PALETTE.length];
    return el("span", null, swatch, name);
  }));
}

function showMetricNames() {
  const names = [...new Set(data.runs.flatMap((x) => Object.keys(x.metrics)))].sort();
  $("metrics").replaceChildren(...names.map((name) => {
    const box = el("input", { type: "checkbox", onchange: () => {
      shown.metrics[box.checked ? "add" : "delete"](name);
      drawCharts();
    } });
    box.checked = shown.metrics.has(name);
    return el("label", null, box, ` ${name}`);
  }));
}

// ---- middle: groups ----

function showGroups() {
  $("groups").replaceChildren(...(shown.trace?.groups ?? []).map((group) => {
    const rewards = group.completions.map((c) => c.reward).filter((x) => typeof x === "number");
    const average = rewards.length ? mean(rewards) : 0;
    const spread = Math.sqrt(sum(rewards.map((x) => (x - average) ** 2)) / rewards.length);
    const updates = group.completions.flatMap((c) => c.updates);
    const loss = sum(updates.map((u) => (u.share ? sum(u.share) : u.row?.share ?? 0)));
    const facts = rewards.length
      ? `${rewards.filter((x) => x >= 1).length} of ${rewards.length} with reward ≥ 1 · mean ${number(average, 3)} ± ${
        number(spread, 3)}` : `loss share ${number(loss, 3)}`;
    return el("button", { class: "group", "aria-current": String(group === shown.group), onclick: () => setGroup(group) },
      el("span", { class: "text" }, group.prompt.trim() || "(no prompt)"),
      el("span", { class: "facts" }, `${group.group}: ${[facts, ...group.chosen].join(" · ")}`));
  }));
}

// ---- right: completions, token by token ----

const AROUND_ONE = ["ratio", "importance", "sampling/weight"];
const MINIMISED = ["gradient", "loss share"]; // an update raises the log-prob where these are negative
const RAISED = ["advantage", "ratio", ...MINIMISED];

/** Return the colours of a quantity: its limit is the 98th percentile of the size of the values. */
function scaleOf(name, values) {
  const of = AROUND_ONE.includes(name) ? Math.log : (x) => x;
  const sign = MINIMISED.includes(name) ? -1 : 1;
  const sizes = values.filter((x) => x !== null).map((x) => Math.abs(of(x))).filter((x) => x > 0 && x < Infinity);
  sizes.sort((a, b) => a - b);
  const limit = sizes[Math.floor(sizes.length * 0.98)] ?? sizes.at(-1) ?? 1;
  const paint = (node, x) => {
    if (x === null || x === undefined || !of(x)) return;
    const strength = Math.min(1, Math.abs(of(x)) / limit) ** 0.8;
    node.style.backgroundColor = `rgb(var(--${sign * of(x) > 0 ? "blue" : "orange"}) / ${(0.06 + 0.6 * strength).toFixed(3)})`;
  };
  const inverse = of === Math.log ? Math.exp : of;
  return { paint, marks: [-1, -0.5, 0, 0.5, 1].map((x) => inverse(x * limit)) };
}

/** Return the completion of the same prompt in a trace of another run, and how many ids are equal. */
function counterpart(theirs, group, g) {
  const equal = theirs.groups.filter((x) => x.prompt === group.prompt);
  const other = (equal.find((x) => x.group === group.group) ?? equal[0])?.completions[g];
  const { ids } = group.completions[g];
  const differs = ids.findIndex((id, i) => id !== other?.ids[i]);
  return { other, end: differs < 0 ? ids.length : differs };
}

function valuesOf(group, g, name, theirs) {
  const own = streamsOf(group.completions[g])[name];
  if (!theirs) return { values: own, end: Infinity };
  const { other, end } = counterpart(theirs, group, g);
  const their = other && streamsOf(other)[name];
  const { start } = group.completions[g];
  const values = own && their && own.map((x, t) => (t + start < end && x !== null ? x - their[t] : null));
  return { values, end };
}

async function showTrace() {
  const { group } = shown;
  if (!group) return ["prompt", "legend", "pictures", "rows"].forEach((id) => $(id).replaceChildren());
  const updates = new Set(group.completions.flatMap((c) => c.updates.map((x) => x.update)));
  options($("update"), [...updates].sort((a, b) => a - b).map((x) => [x, String(x)]), $("update").value);
  const names = new Set(group.completions.flatMap((c) => Object.keys(streamsOf(c))));
  options($("quantity"), [...names].map((x) => [x, x]), $("quantity").value || "advantage");
  const name = $("quantity").value;
  const other = $("other").value && data.runs[$("other").value];
  const theirs = other && other.traces.length ? await load($("other").value, nearest(other.traces, state.step)) : null;
  if (group !== shown.group) return; // another one was chosen meanwhile
  const found = group.completions.map((_, g) => valuesOf(group, g, name, theirs));
  const scale = scaleOf(theirs ? "difference" : name, found.flatMap(({ values }, g) => (
    (values ?? []).filter((_, t) => group.completions[g].mask[t]))));
  $("prompt").textContent = group.prompt;
  $("pictures").replaceChildren(...picturesOf(group.completions[0]));
  const swatches = scale.marks.map((x) => el("span", null, number(x, 3)));
  swatches.forEach((node, i) => scale.paint(node, scale.marks[i]));
  const isConstant = ({ values }, g) => (values ?? []).every((x, t) => !group.completions[g].mask[t] || x === values[
    group.completions[g].mask.indexOf(1)]);
  const each = found.every(isConstant) ? ", one value per completion" : "";
  const meaning = RAISED.includes(name) && !theirs ? "blue: the update raises it, orange: lowers it" : "blue: positive";
  $("legend").replaceChildren(name + (theirs ? `, minus that of ${other.name} in step ${theirs.step}` : each),
    el("span", { class: "scale" }, ...swatches), meaning, el("span", { class: "clipped" }, "clipped"),
    el("span", { class: "untrained" }, "not trained"), theirs ? el("span", { class: "differs" }, "other tokens") : "");
  $("rows").replaceChildren(...group.completions.map((completion, g) => el("div", { class: "row" },
    factsOf(completion, g), tokensOf(completion, scale, found[g]))));
  $("rows").querySelector(".token")?.setAttribute("tabindex", 0);
}

function factsOf(completion, g) {
  const skip = ["start", "ids", "tokens", "mask", "fixed", "updates", "images"];
  const facts = Object.entries(completion).filter(([name]) => !skip.includes(name));
  const row = Object.entries(updateOf(completion)?.row ?? {}); // values of a completion, or of its pair
  const length = completion.ids.length - completion.start;
  return el("div", { class: "facts" }, `${g} · ${length} tokens, ${sum(completion.mask)} trained`,
    ...[...facts, ...row].map(([name, x]) => ` · ${name.replace("_", " ")} ${number(x)}`));
}

/** Return images; a line for one that cannot be shown. A click enlarges an image. */
function picturesOf({ images = [] }) {
  return images.map(({ file, url, problem }, i) => {
    if (!url) return el("p", { class: "facts" }, `image ${i + 1}: ${problem}`);
    const button = el("button", { title: file, onclick: () => button.classList.toggle("large") },
      el("img", { src: url, alt: `image ${i + 1}, ${file}` }));
    return button;
  });
}

/** Return the tokens of a completion; those of an image are folded into one. */
function tokensOf(completion, scale, { values, end }) {
  const line = el("div", { class: "tokens" });
  const clipped = streamsOf(completion)["clip_ratio/region_mean"];
  for (let i = $("whole").checked ? 0 : completion.start; i < completion.tokens.length; i++) {
    const t = i - completion.start;
    const image = completion.images?.find((x) => i >= x.start && i < x.end);
    const trained = completion.mask[t] === 1;
    const classes = ["token", trained ? "" : "untrained", clipped?.[t] ? "clipped" : "", i >= end ? "differs" : ""];
    const text = image ? `[${image.end - image.start} image tokens]` : completion.tokens[i].replace(/\n/g, "⏎\n") || "∅";
    const node = el("span", { class: classes.filter(Boolean).join(" "), tabindex: -1 }, text);
    if (trained && values) scale.paint(node, values[t]);
    line.append(Object.assign(node, { at: { completion, t, value: values?.[t] } }));
    if (image) i = image.end - 1;
  }
  return line;
}

/** Say all values of a token in the status line. */
function focused({ target }) {
  if (!target.at) return;
  const { completion, t, value } = target.at;
  const i = completion.start + t;
  const facts = [`token ${t} ${JSON.stringify(completion.tokens[i])} (id ${completion.ids[i]})`];
  if (!completion.mask[t]) facts.push("not trained");
  if ($("other").value) facts.push(`difference ${number(value)}`);
  if (t >= 0) for (const [name, xs] of Object.entries(streamsOf(completion))) facts.push(`${name} ${number(xs[t])}`);
  $("status").textContent = facts.join(" · ");
  document.querySelector(".token[aria-current]")?.removeAttribute("aria-current");
  target.setAttribute("aria-current", "true");
}

function moveFocus(event) {
  const { target, key } = event;
  const tokens = (row, i) => row && [...row.querySelectorAll(".token")].at(i);
  const row = target.closest(".row");
  const next = { ArrowLeft: () => target.previousSibling, ArrowRight: () => target.nextSibling, Home: () => tokens(row, 0),
    End: () => tokens(row, -1), ArrowUp: () => tokens(row.previousSibling, 0),
    ArrowDown: () => tokens(row.nextSibling, 0) }[key]?.();
  if (target.at && next) [event.preventDefault(), next.focus()];
}

// ---- what the controls do ----

function setGroup(group) {
  shown.group = group;
  state.group = group?.group ?? null;
  showGroups();
  return showTrace();
}

async function setStep(step) {
  const last = Math.max(...Object.values(run().metrics).map(([steps]) => steps.at(-1)));
  state.step = Math.min(step, last);
  const trace = nearest(run().traces, state.step);
  $("slider").max = Math.max(0, run().traces.length - 1);
  $("slider").value = run().traces.indexOf(trace);
  $("where").textContent = `step ${state.step}, ${trace ? `trace of ${trace.step}` : "no traces"}`;
  shown.charts.forEach((chart) => { chart.redraw(false); chart.title(); });
  const loaded = trace ? await load(state.run, trace) : null;
  if (trace !== nearest(run().traces, state.step)) return; // a later call was faster
  shown.trace = loaded;
  const groups = loaded?.groups ?? [];
  await setGroup(groups.find((x) => x.group === state.group)
    ?? groups.find((x) => x.chosen.includes("disputed")) ?? groups[0] ?? null);
}

function setRun(r) {
  state.run = Number(r);
  document.title = $("title").textContent = run().name;
  const others = data.runs.flatMap((x, i) => (i === state.run ? [] : [[i, x.folder]]));
  options($("other"), [["", "nothing"], ...others], $("other").value);
  return setStep(state.step);
}

function slide(by) {
  $("slider").value = Number($("slider").value) + by;
  setStep(run().traces[$("slider").value]?.step ?? state.step);
}

options($("run"), data.runs.map((x, i) => [i, x.folder]), 0);
$("run").parentNode.hidden = $("other").parentNode.hidden = data.runs.length < 2;
$("run").addEventListener("change", () => setRun($("run").value));
$("previous").addEventListener("click", () => slide(-1));
$("next").addEventListener("click", () => slide(1));
$("slider").addEventListener("input", () => slide(0));
for (const id of ["update", "quantity", "whole", "other"]) $(id).addEventListener("change", showTrace);
$("rows").addEventListener("focusin", focused);
$("rows").addEventListener("click", ({ target }) => target.at && target.focus());
$("rows").addEventListener("keydown", moveFocus);
addEventListener("resize", drawCharts);
showMetricNames();
drawCharts();
setRun(0).then(() => document.body.setAttribute("data-ready", ""));
