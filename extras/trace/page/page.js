"use strict";

// ---- small tools; all text goes into the page as text nodes ----

const $ = (id) => document.getElementById(id);
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const mean = (xs) => sum(xs) / xs.length;

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
  const text = plain ? String(Number(x.toPrecision(digits))) : x.toExponential(digits - 1).replace(/\.?0+e/, "e");
  return text.replace("-", "−").replace("e-", "e−").replace("e+", "e");
}

function options(select, values, chosen) {
  select.replaceChildren(...values.map(([value, text]) => el("option", { value }, text)));
  if (values.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

/** Show a list of any length. A block of items is rendered while it is near the visible part, and keeps its height. */
function lazy(container, items, render, height) {
  const size = 10;
  const blocks = items.flatMap((_, from) => (from % size ? [] : [Object.assign(el("div"), { from })]));
  const fill = (block) => {
    if (block.firstChild) return;
    block.append(...items.slice(block.from, block.from + size).map((item, i) => render(item, block.from + i)));
    block.style.minHeight = "";
  };
  const clear = (block) => {
    if (block.contains(document.activeElement) || !block.firstChild) return;
    block.style.minHeight = `${block.offsetHeight}px`;
    block.replaceChildren();
  };
  container.seen?.disconnect();
  container.seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) (isIntersecting ? fill : clear)(target);
  }, { rootMargin: "400px 0px", scrollMargin: "400px 0px" });
  for (const block of blocks) {
    block.style.minHeight = `${height * size}px`;
    container.seen.observe(block);
  }
  container.replaceChildren(...blocks);
  container.fill = (index) => { // returns the node of an item
    const block = blocks[Math.floor(index / size)];
    return block && (fill(block), block.children[index % size]);
  };
}

// ---- formulas: text that is shown, evaluated, and shown again with its numbers ----

const FUNCTIONS = {
  exp: (x) => Math.exp(Math.min(x, 60)), expm1: (x) => Math.expm1(Math.min(x, 60)), log: Math.log,
  min: Math.min, max: Math.max, clip: (x, low, high) => Math.min(Math.max(x, low), high),
  where: (condition, a, b) => (Number.isNaN(condition) ? NaN : condition ? a : b),
  sigmoid: (x) => 1 / (1 + Math.exp(-x)),
  logsigmoid: (x) => -Math.log1p(Math.exp(-Math.abs(x))) + Math.min(x, 0),
};
const OPERATORS = [
  { "<": (a, b) => (a < b ? 1 : a >= b ? 0 : NaN), ">": (a, b) => (a > b ? 1 : a <= b ? 0 : NaN) },
  { "+": (a, b) => a + b, "-": (a, b) => a - b },
  { "*": (a, b) => a * b, "/": (a, b) => a / b },
];

function evaluate(text, names) {
  const words = text.match(/\d+(\.\d+)?|\w+|[-+*/<>(),]/g);
  let at = 0;
  const binary = (level) => {
    if (level === OPERATORS.length) return operand();
    let left = binary(level + 1);
    while (OPERATORS[level][words[at]]) left = OPERATORS[level][words[at++]](left, binary(level + 1));
    return left;
  };
  const operand = () => {
    const word = words[at++];
    if (word === "-") return -operand();
    if (word === "(") return [binary(0), at++][0];
    if (words[at] !== "(") return /^\d/.test(word) ? Number(word) : names[word] ?? NaN;
    const values = [];
    do values.push((at++, binary(0))); while (words[at] === ",");
    at++;
    return FUNCTIONS[word](...values);
  };
  return binary(0);
}

function withNumbers(text, names) {
  return text.replace(/[A-Za-z_]\w*(?![\w(])/g, (name, at) => {
    const value = number(names[name], 6);
    return value.startsWith("−") && at > 0 && !/[(,] ?$/.test(text.slice(0, at)) ? `(${value})` : value;
  });
}

// ---- values of a completion in an update ----

/** Return the streams of a completion in an update by name; the first ones have readable names. */
function streams(completion, update) {
  if (update.streams) return update.streams;
  const { old_logprobs: old = completion.updates[0].logprobs, ...known } = { ...completion.fixed, ...update };
  const minus = (xs, ys) => xs && ys && xs.map((x, t) => (x === null || ys[t] === null ? null : x - ys[t]));
  const { advantages, ratio, entropy, kl, share, logprobs, logprobs_gradient, versions, ...others } = known;
  const everywhere = completion.advantage !== undefined && completion.mask.map(() => completion.advantage);
  const named = { advantage: advantages ?? everywhere, ratio, "engine gap": minus(known.rollout_logprobs, old), entropy,
    "KL to the reference": kl ?? minus(logprobs, known.ref_logprobs), "loss share": share,
    gradient: logprobs_gradient ?? known.value_gradient, "log-prob": logprobs,
    old_logprobs: completion.fixed.old_logprobs, ...others, versions };
  return (update.streams = Object.fromEntries(Object.entries(named).filter(([, xs]) => Array.isArray(xs))));
}

/** Return the names in the formulas of a completion's tokens: flags, counts, sums, and values of the completion. */
function namesOf(trace, group, completion, update) {
  if (update.names) return update.names;
  const trained = completion.mask.flatMap((x, t) => (x ? [t] : []));
  const names = { ...trace.flags, ...completion, length: trained.length };
  if (trace.beta !== undefined) names.beta = trace.beta; // it may follow the KL
  for (const name of ["tokens", "sequences"]) names[name] = trace[name]?.[update.update];
  const known = { old_logprobs: update.logprobs, ...completion.fixed, ...update };
  for (const [name, xs] of Object.entries(known)) {
    if (Array.isArray(xs)) names[`sum_${name}`] = sum(trained.map((t) => xs[t]));
  }
  [names.nc, names.nr] = group.completions.map((of) => sum(of.mask));
  return (update.names = names);
}

/** Return the formulas of a token, or of its row, with values, and the share that they and the trace have; null if the
 * update has none. */
function sheet(trace, group, completion, t, u) {
  const update = completion.updates[u];
  const first = group.completions[0].updates.find((x) => x.update === update?.update);
  const ofToken = update?.share !== undefined;
  const of = ofToken || update?.row ? update : first; // the values of a pair stand with its first completion
  if (!of || (ofToken && !completion.mask[t])) return null;
  const at = ofToken ? t : completion.mask.lastIndexOf(1);
  const known = { old_logprobs: of.logprobs, ...completion.fixed, ...of };
  const values = Object.entries(known).map(([name, xs]) => [name, Array.isArray(xs) ? xs[at] : undefined]);
  const names = Object.create(namesOf(trace, group, completion, of));
  for (const [name, x] of [...values, ...Object.entries(of.row ?? {})]) {
    if (x !== undefined && x !== null && name !== "share") names[name.replace("data/", "").replace(/\W/g, "_")] = x;
  }
  if (names.advantages !== undefined) names.advantage = names.advantages; // of the token
  names.recorded = ofToken ? update.share[t] : of.row?.share;
  const lines = trace.formulas.map(([name, text]) => {
    const [value, numbers] = [evaluate(text, names), withNumbers(text, names)];
    names[name] = value;
    return { name, text, numbers, value };
  });
  const largest = ofToken ? Math.max(...update.share.map(Math.abs)) : names.recorded;
  const difference = Math.abs(names.share - names.recorded) / Math.max(Math.abs(largest), 1e-300);
  return { lines, share: names.share ?? NaN, recorded: names.recorded, ofToken, difference, equal: difference < 1e-5 };
}

/** Return whether the formulas of a trace give the shares that it recorded, of 1000 tokens or rows if it has more. */
function reproduces(trace) {
  const ofUpdate = ({ share, row }) => [...(share?.keys() ?? (row?.share === undefined ? [] : [0]))];
  const places = trace.groups.flatMap((group) => group.completions.flatMap((c) => c.updates.flatMap(
    (update, u) => ofUpdate(update).map((t) => [group, c, t, u]))));
  const every = Math.ceil(places.length / 1000);
  let nonzero = false;
  for (let i = 0; i < places.length; i += every) {
    const found = sheet(trace, ...places[i]);
    if (found && !found.equal) return false;
    nonzero ||= Boolean(found?.recorded);
  }
  return nonzero;
}

/** Return the formulas of the script of a run, or of the script that it is a copy of, and the name of that script. */
function formulasOf({ script, formulas }, trace) {
  if (formulas[script]) return { formulas: formulas[script], origin: script };
  const found = Object.entries(formulas).find(([_, lines]) => reproduces({ ...trace, formulas: lines }));
  return { formulas: found?.[1] ?? [], origin: found?.[0] };
}

/** Return how many recorded shares of a completion the formulas reproduce, and the largest differences. */
function audit(trace, group, completion, u) {
  const places = completion.updates[u]?.share?.keys() ?? [0];
  const all = [...places].map((t) => sheet(trace, group, completion, t, u));
  const found = all.filter((x) => x && !Number.isNaN(x.share));
  const relative = found.map((x) => (x.share === x.recorded ? 0 : Math.abs(x.share / x.recorded - 1)));
  return { tokens: found.length, equal: found.filter((x) => x.equal).length, relative: Math.max(0, ...relative),
    largest: Math.max(0, ...found.map((x) => x.difference)) };
}

// ---- state, and the traces ----

let data = JSON.parse($("data").textContent);
const state = { run: 0, step: Infinity, group: null, tab: "trace", at: null }; // at: row, token, column of the focus
const shown = { trace: null, metrics: new Set(data.main), charts: [], rows: null };
const cache = new Map();
const PALETTE = ["#3b7dbf", "#d9772b", "#4d9c5a", "#9a6bb5", "#b5555a", "#85857c", "#3a9a9a", "#c0a030"];
const run = () => data.runs[state.run];
const nearest = (traces, step) => [...traces].sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];

/** Return the trace of a step with summaries of its groups. The page keeps the last few. */
function load(r, header) {
  const key = `${r} ${header.step}`;
  if (!cache.has(key)) cache.set(key, read(data.runs[r], r, header));
  if (cache.size > 6) cache.delete(cache.keys().next().value);
  return cache.get(key);
}

function decoded(base64) {
  const text = atob(base64);
  return new Uint8Array(text.length).map((_, i) => text.charCodeAt(i));
}

async function read(of, r, header) {
  const bytes = header.gzip ? decoded(header.gzip) : await (await fetch(`trace/${r}/${header.step}`)).arrayBuffer();
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const groups = text.trimEnd().split("\n").slice(1).map((line) => JSON.parse(line));
  const images = groups.flatMap((group) => group.completions.flatMap((c) => c.images ?? []));
  const pictures = !images.length ? {} : header.gzip ? data.pictures
    : await (await fetch(`pictures/${r}/${header.step}`)).json();
  for (const image of images) Object.assign(image, pictures[image.digest]);
  const [steps, betas] = of.metrics.beta ?? [[], []];
  const trace = { ...header, flags: of.flags, groups, beta: betas[steps.indexOf(header.step)] };
  Object.assign(trace, formulasOf(of, trace));
  for (const group of groups) {
    const rewards = group.completions.map((c) => c.reward).filter((x) => typeof x === "number");
    group.rewards = rewards;
    group.mean = rewards.length ? mean(rewards) : 0;
    group.spread = rewards.length ? Math.sqrt(mean(rewards.map((x) => (x - group.mean) ** 2))) : 0;
    const updates = group.completions.flatMap((c) => c.updates);
    group.loss = sum(updates.map((u) => (u.share ? sum(u.share) : u.row?.share ?? 0)));
    const texts = group.completions.map((c) => c.tokens.slice(c.start).join(""));
    group.text = [group.prompt, ...texts].join("\n").toLowerCase();
  }
  return trace;
}

// ---- left: curves and timeline ----

function linesOf(name) {
  const lines = [];
  data.groups.forEach((group, g) => {
    if (group.curves[name]) lines.push({ label: group.label, colour: g, data: group.curves[name] });
    else group.runs.filter((r) => data.runs[r].metrics[name]).forEach((r) => lines.push(
      { label: data.runs[r].name, colour: data.groups.length > 1 ? g : r, data: data.runs[r].metrics[name] }));
  });
  return lines;
}

function drawCharts() {
  const css = getComputedStyle(document.documentElement);
  const [dim, line, ink] = ["--dim", "--line", "--ink"].map((name) => css.getPropertyValue(name).trim());
  shown.charts.forEach((chart) => chart.destroy());
  $("charts").replaceChildren();
  const width = Math.max(200, $("curves").clientWidth - 28);
  shown.charts = [...shown.metrics].filter((name) => linesOf(name).length).map((name) => {
    const lines = linesOf(name);
    const series = [{}], bands = [];
    for (const { colour, data: columns } of lines) {
      const stroke = PALETTE[colour % PALETTE.length];
      series.push({ stroke, width: 1.5, spanGaps: true, points: { show: columns[0].length < 30, size: 4 } });
      if (columns.length < 4) continue;
      const edge = { stroke: `${stroke}55`, width: 0.5, spanGaps: true, points: { show: false } };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${stroke}33` });
    }
    const title = el("span", { class: "number" });
    const holder = el("div", { class: "chart" }, el("div", { class: "chart-title" }, el("span", null, name), title));
    $("charts").append(holder);
    const axis = { stroke: dim, grid: { stroke: line, width: 0.5 }, ticks: { show: false }, font: "11px system-ui" };
    const y = { ...axis, size: 52, space: 24, values: (u, ticks) => ticks.map((x) => number(x, 3)) };
    const mark = (u) => {
      const x = u.valToPos(Number.isFinite(state.step) ? state.step : u.scales.x.max, "x", true);
      u.ctx.fillStyle = ink;
      u.ctx.fillRect(x, u.bbox.top, devicePixelRatio, u.bbox.height);
    };
    const chart = new uPlot({ width, height: 110, series, bands, cursor: { sync: { key: "step" }, y: false },
      scales: { x: { time: false } }, hooks: { draw: [mark] }, legend: { show: false },
      axes: [{ ...axis, size: 22 }, y] },
    uPlot.join(lines.map((x) => x.data)), holder);
    chart.over.addEventListener("click", () => setStep(Math.round(chart.posToVal(chart.cursor.left, "x"))));
    chart.title = () => {
      const values = lines.map(({ data: [steps, values] }) => values[steps.indexOf(state.step)]);
      title.textContent = values.map((x) => number(x)).join("  ");
    };
    return chart;
  });
  const labels = linesOf([...shown.metrics].find((name) => linesOf(name).length) ?? "");
  $("labels").replaceChildren(...(data.runs.length > 1 ? labels : []).map(({ label, colour }) => key(label, colour)));
}

function key(label, colour) {
  const swatch = el("i");
  swatch.style.backgroundColor = PALETTE[colour % PALETTE.length];
  return el("span", null, swatch, label);
}

function drawTimeline() {
  const { timeline } = run();
  $("timeline").hidden = !timeline.length;
  if (!timeline.length) return;
  const steps = timeline[0].what.flatMap((what, i) => (what === "step" ? [i] : []));
  const [done] = Object.values(run().metrics).map(([xs]) => xs.at(-1)).sort((a, b) => b - a);
  const index = Math.min(steps.length - 1, Math.max(0, steps.length - 1 - (done - Math.min(state.step, done))));
  const half = Number($("window").value) / 2;
  const edge = (list, i) => timeline[0][list][steps[Math.min(steps.length - 1, Math.max(0, i))]];
  const whole = !half || !steps.length;
  const begin = whole ? Math.min(...timeline.map((x) => x.began[0])) : edge("began", Math.ceil(index - half));
  const end = whole ? Math.max(...timeline.map((x) => x.ended.at(-1))) : edge("ended", Math.floor(index + half));
  const canvas = $("ranks"), width = $("curves").clientWidth - 28, scale = devicePixelRatio;
  const names = [...new Set(timeline.flatMap((x) => x.what))].filter((what) => what !== "step");
  [canvas.width, canvas.height] = [width * scale, timeline.length * 18 * scale];
  canvas.style.height = `${timeline.length * 18}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  timeline.forEach((rank, y) => rank.what.forEach((what, i) => {
    if (what === "step" || rank.ended[i] < begin || rank.began[i] > end) return;
    const x = ((rank.began[i] - begin) / (end - begin)) * width;
    context.fillStyle = PALETTE[names.indexOf(what) % PALETTE.length];
    context.fillRect(x, y * 18 + 1, Math.max(0.5, ((rank.ended[i] - rank.began[i]) / (end - begin)) * width), 15);
  }));
  const ranks = timeline.map((x) => x.rank).join(", ");
  $("spans").replaceChildren(el("span", null, `${number(end - begin)} s, ranks ${ranks}`), ...names.map(key));
}

// ---- middle: groups ----

const limit = (id, or) => ($(id).value === "" ? or : Number($(id).value));

function matches(completion) {
  const length = completion.ids.length - completion.start;
  const reward = completion.reward ?? NaN;
  return !(reward < limit("reward-low", -Infinity)) && !(reward > limit("reward-high", Infinity))
    && length >= limit("length-low", 0) && length <= limit("length-high", Infinity)
    && (!$("finish").value || completion.finish_reason === $("finish").value);
}

function showGroups() {
  const { groups } = shown.trace ?? { groups: [] };
  const rank = { spread: (g) => -g.spread, mean: (g) => -g.mean, loss: (g) => -Math.abs(g.loss),
    position: (g) => g.group }[$("order").value];
  const text = $("text").value.toLowerCase();
  const found = groups.filter((g) => g.text.includes(text) && g.completions.some(matches));
  found.sort((a, b) => rank(a) - rank(b) || a.group - b.group);
  $("found").textContent = `${found.length} of ${groups.length} groups`;
  lazy($("list"), found, (group, index) => {
    const G = group.completions.length;
    const solved = group.rewards.filter((x) => x >= 1).length;
    const facts = group.rewards.length
      ? `${solved} of ${G} with reward ≥ 1 · mean ${number(group.mean, 3)} ± ${number(group.spread, 3)}`
      : `${G > 1 ? "pair" : "row"} · loss share ${number(group.loss, 3)}`;
    const button = el("button", { class: "group", "aria-current": String(group === shown.group),
      onclick: () => setGroup(group) }, el("span", { class: "text" }, group.prompt.trim() || "(no prompt)"),
    el("span", { class: "facts" }, `${group.group}: ${facts} `,
      el("span", { class: "reason" }, group.chosen.join(", "))));
    return Object.assign(button, { group, index });
  }, 50);
  if (!found.includes(shown.group)) setGroup(found[0] ?? null);
}

// ---- rows of tokens ----

const AROUND_ONE = ["ratio", "importance", "sampling/weight"];

/** Return the colours of a quantity: its limit is the 98th percentile of the size of the values. */
function scaleOf(name, values) {
  const of = AROUND_ONE.includes(name) ? Math.log : (x) => x;
  const sizes = values.filter((x) => x !== null).map((x) => Math.abs(of(x))).filter((x) => x > 0 && x < Infinity);
  sizes.sort((a, b) => a - b);
  const limit = sizes[Math.floor(sizes.length * 0.98)] ?? sizes.at(-1) ?? 1;
  const paint = (node, x) => {
    if (x === null || x === undefined || !of(x)) return;
    const strength = Math.min(1, Math.abs(of(x)) / limit) ** 0.8;
    node.style.backgroundColor = `rgb(var(--${of(x) > 0 ? "blue" : "orange"}) / ${(0.06 + 0.6 * strength).toFixed(3)})`;
  };
  const inverse = of === Math.log ? Math.exp : of;
  const signed = values.some((x) => x !== null && of(x) < 0);
  return { paint, marks: [-1, -0.5, 0, 0.5, 1].filter((x) => signed || x >= 0).map((x) => inverse(x * limit)) };
}

function legend(place, name, { paint, marks }, ...notes) {
  const swatches = marks.map((x) => el("span", { class: "number" }, number(x, 3)));
  swatches.forEach((node, i) => paint(node, marks[i]));
  $(place).replaceChildren(el("span", null, name), el("span", { class: "scale" }, ...swatches), ...notes);
}

/** Return the images of a completion, side by side; a line for one that cannot be shown. A click enlarges an image. */
function picturesOf({ images = [] }) {
  return images.length ? el("div", { class: "pictures" }, ...images.map(({ file, url, problem }, i) => {
    if (!url) return el("p", { class: "facts" }, `image ${i + 1}, ${file}: ${problem}`);
    const button = el("button", { title: file, onclick: () => button.classList.toggle("large") },
      el("img", { src: url, alt: `image ${i + 1}, ${file}` }));
    return button;
  })) : null;
}

/** Return what stands for the tokens of an image: how many there are. */
function imageText({ ids, images }, image) {
  const placeholders = ids.slice(image.start, image.end).filter((id) => id === ids[image.start]).length;
  const others = image.end - image.start - placeholders;
  const which = images.length > 1 ? `image ${images.indexOf(image) + 1}: ` : "";
  return `${which}${placeholders} image tokens${others ? ` and ${others} others` : ""}`;
}

/** Return the tokens of a completion from the id `from`; `values`: the coloured quantity, from `start`. The tokens of
 * an image are folded into one. */
function tokensOf(completion, { from, values, scale, clipped, differs, row, column }) {
  const line = el("div", { class: "tokens" });
  for (let i = from; i < completion.tokens.length; i++) {
    const t = i - completion.start;
    const image = completion.images?.find(({ start, end }) => i >= start && i < end);
    if (image) {
      const node = el("span", { class: "token image", tabindex: -1, title: image.file }, imageText(completion, image));
      i = image.end - 1;
      line.append(Object.assign(node, { at: { row, column, t, last: i - completion.start, image } }));
      continue;
    }
    const trained = completion.mask[t] === 1;
    const classes = ["token", trained ? "" : "untrained", clipped?.[t] ? "clipped" : "", differs?.(i) ? "differs" : ""];
    const text = completion.tokens[i].replace(/\n/g, "⏎\n") || "∅";
    const node = el("span", { class: classes.join(" ").trim(), tabindex: -1 }, text);
    if (trained && values) scale.paint(node, values[t]);
    Object.assign(node, { at: { row, column, t } });
    line.append(node);
  }
  return line;
}

/** Move the focus to a token, and say its values in the status line. */
function focusToken(row, column, t) {
  const { place, items } = shown.rows ?? {};
  const completion = items?.[row]?.[column];
  if (!completion) return;
  const from = place === "data-rows" ? -completion.start : 0;
  const wanted = Math.min(completion.mask.length - 1, Math.max(from, t));
  const nodes = $(place).fill(row).querySelectorAll(".tokens")[column]?.children ?? [];
  const node = [...nodes].findLast((x) => x.at.t <= wanted);
  if (!node) return;
  const { t: token, image } = node.at;
  document.querySelector(".token[aria-current]")?.removeAttribute("aria-current");
  node.setAttribute("aria-current", "true");
  state.at = { row, column, t: token };
  if (document.activeElement !== node) node.focus({ preventScroll: true });
  node.scrollIntoView({ block: "nearest" });
  const i = completion.start + token;
  if (image) {
    $("status").textContent = `${imageText(completion, image)} · tokens ${token} to ${node.at.last} · ${image.file}`;
    return;
  }
  const facts = [`token ${token} ${JSON.stringify(completion.tokens[i])} (id ${completion.ids[i]})`];
  const update = completion.updates[updateIndex(completion)];
  if (token < 0 || !completion.mask[token]) facts.push("not trained");
  if (token >= 0 && update) {
    for (const [name, xs] of Object.entries(streams(completion, update))) facts.push(`${name} ${number(xs[token])}`);
  }
  if (shown.rows.status) facts.push(...shown.rows.status(row, column, token));
  $("status").textContent = facts.join(" · ");
}

function moveFocus(event) {
  const node = event.target.closest?.(".token");
  if (!node) return;
  const { row, column, t, last = t } = node.at;
  const moves = { ArrowLeft: [row, t - 1], ArrowRight: [row, last + 1], ArrowUp: [row - 1, t], ArrowDown: [row + 1, t],
    Home: [row, -1e9], End: [row, 1e9] };
  if (event.key === "Enter") openFormula();
  else if (moves[event.key]) focusToken(moves[event.key][0], column, moves[event.key][1]);
  else return;
  event.preventDefault();
}

// ---- right: completions, and the loss of a token ----

const updateIndex = (completion) => completion.updates.findIndex((x) => String(x.update) === $("update").value);

function factsOf(completion, index) {
  const skip = ["start", "ids", "tokens", "mask", "fixed", "updates", "images"];
  const facts = Object.entries(completion).filter(([name]) => !skip.includes(name));
  const length = completion.ids.length - completion.start;
  const { row = {} } = completion.updates[updateIndex(completion)] ?? {};
  return el("div", { class: "facts" }, el("b", null, `${index} `), [`${length} tokens, ${sum(completion.mask)} trained`,
    ...facts.map(([name, x]) => `${name.replace("_", " ")} ${number(x)}`),
    ...Object.entries(row).map(([name, x]) => `${name} ${number(x)}`)].join(" · "));
}

function showTrace() {
  const { group, trace } = shown;
  $("formula").hidden = true;
  if (!group) return ["prompt", "legend", "pictures", "rows"].forEach((id) => $(id).replaceChildren());
  const at = (c) => c.updates[updateIndex(c)] ?? null;
  const updates = [...new Set(group.completions.flatMap((c) => c.updates.map((x) => x.update)))].sort((a, b) => a - b);
  options($("update"), updates.map((x) => [x, String(x)]), $("update").value);
  const known = (c) => (at(c) ? streams(c, at(c)) : {});
  const sample = group.completions.filter((_, i, all) => i % Math.ceil(all.length / 300) === 0);
  const quantities = [...new Set(sample.flatMap((c) => Object.keys(known(c))))];
  options($("quantity"), quantities.map((x) => [x, x]), $("quantity").value || "advantage");
  const name = $("quantity").value;
  const scale = scaleOf(name, sample.flatMap((c) => (known(c)[name] ?? []).filter((_, t) => c.mask[t])));
  const kept = group.completions.map((c, i) => i).filter((i) => matches(group.completions[i]));
  $("prompt").textContent = group.prompt;
  $("pictures").replaceChildren(picturesOf(group.completions[0]) ?? "");
  const hatched = el("span", null, el("i", { class: "swatch clipped" }), "clipped");
  legend("legend", name, scale, hatched, el("span", { class: "token untrained" }, "not trained"),
    el("span", null, `${kept.length} of ${group.completions.length} completions, step ${trace.step}`));
  shown.rows = { place: "rows", items: kept.map((i) => [group.completions[i]]) };
  lazy($("rows"), kept, (i, row) => {
    const completion = group.completions[i];
    const { [name]: values, "clip_ratio/region_mean": clipped } = known(completion);
    return el("div", { class: "row" }, factsOf(completion, i),
      tokensOf(completion, { from: completion.start, values, scale, clipped, row, column: 0 }));
  }, 60);
  $("rows").fill(0)?.querySelector(".token")?.setAttribute("tabindex", 0);
}

function openFormula() {
  const { trace, group } = shown;
  if (state.tab !== "trace") return;
  const completion = shown.rows.items[state.at.row][state.at.column];
  const u = updateIndex(completion);
  const found = sheet(trace, group, completion, state.at.t, u);
  const close = el("button", { class: "close", "aria-label": "close", onclick: closeFormula }, "×");
  $("formula").replaceChildren(close, el("p", null, "This token adds nothing to the loss of this update."));
  if (found) {
    const whole = audit(trace, group, completion, u);
    const rows = found.lines.map(({ name, text, numbers, value }) => el("tr", null, el("td", null, name),
      el("td", null, `= ${text.replaceAll("-", "−")}`), el("td", null, `= ${numbers.replaceAll("-", "−")}`),
      el("td", { class: "number" }, `= ${number(value, 7)}`)));
    const copied = trace.origin && trace.origin !== run().script;
    const verdict = found.recorded === undefined ? "none in the trace. Log it with meter.tokens or meter.rows"
      : !rows.length ? "no formulas. tools/formulas.py has none that give the shares of this trace, or all are 0"
      : Number.isNaN(found.share) ? "the trace lacks a number of this formula"
        : found.equal ? "equal to the digits of the trace" : "different";
    const token = `${state.at.t} ${JSON.stringify(completion.tokens[completion.start + state.at.t])}`;
    $("formula").replaceChildren(close, el("h2", null, found.ofToken ? `Loss of token ${token}` : "Loss of the row"),
      el("table", { class: "sheet mono" }, ...rows),
      el("p", null, `recorded share ${number(found.recorded, 7)}: `,
        el("span", { class: found.equal ? "same" : "other" }, verdict), found.ofToken && rows.length
          ? `. Of the completion: ${whole.equal} of ${whole.tokens} shares are equal; largest difference `
          + `${number(whole.largest, 2)} of the largest share` : ""),
      el("p", null, copied ? `The formulas are those of ${trace.origin}.py. They give the shares of this trace.` : ""),
      ...run().source.map(sourceOf));
  }
  $("formula").hidden = false;
  $("formula").scrollTo(0, 0);
  $("formula").scrollIntoView({ block: "nearest" });
}

function closeFormula() {
  $("formula").hidden = true;
  focusToken(state.at.row, state.at.column, state.at.t);
}

/** Return the source of a function, with the lines marked that the flags select. */
function sourceOf({ file, name, lines, marked }) {
  const code = lines.map((line, i) => el("span", { class: marked.includes(i) ? "marked" : "" }, line || " "));
  return el("details", { open: true }, el("summary", { class: "mono" }, `${file}, ${name}`),
    el("pre", { class: "source", tabindex: 0 }, ...code));
}

// ---- the pages data and compare ----

function showData() {
  const groups = shown.trace?.groups ?? [];
  const rows = shown.data = groups.flatMap((group) => group.completions.map((c, i) => ({ group, c, i })));
  const [tokens, trained] = [sum(rows.map(({ c }) => c.ids.length)), sum(rows.map(({ c }) => sum(c.mask)))];
  $("data-note").textContent = `${rows.length} rows, ${tokens} tokens, ${trained} trained`;
  shown.rows = { place: "data-rows", items: rows.map(({ c }) => [c]) };
  const scale = { paint: (node) => { node.style.backgroundColor = "rgb(var(--blue) / 0.16)"; } };
  lazy($("data-rows"), rows, ({ group, c, i }, row) => el("div", { class: "row beside" }, picturesOf(c), el("div", null,
    factsOf(c, group.completions.length > 1 ? `${group.group}.${i}` : group.group),
    tokensOf(c, { from: 0, values: c.mask, scale, row, column: 0 }))), 90);
  $("data-rows").fill(0)?.querySelector(".token")?.setAttribute("tabindex", 0);
}

/** Return pairs of completions of a prompt in two traces, with the difference of a stream while their ids are equal. */
function matchPairs(mine, other, name, update) {
  const updateOf = (c) => c.updates.find((x) => x.update === update) ?? c.updates[0];
  const valuesOf = (c) => updateOf(c) && streams(c, updateOf(c))[name];
  return mine.groups.flatMap((a) => {
    const equal = other.groups.filter((b) => b.prompt === a.prompt);
    const b = equal.find((x) => x.group === a.group && mine.step === other.step) ?? equal[0];
    return (b ? a.completions.slice(0, b.completions.length) : []).map((c, i) => {
      const d = b.completions[i];
      const differs = c.ids.findIndex((id, t) => id !== d.ids[t]);
      const end = differs < 0 ? Math.min(c.ids.length, d.ids.length) : differs;
      const [xs, ys] = [valuesOf(c), valuesOf(d)];
      const values = xs && ys ? xs.map((x, t) => (t + c.start < end ? x - ys[t] : null)) : [];
      return { prompt: a.prompt, place: `${a.group}.${i}`, both: [c, d], end, values };
    });
  });
}

function table(heads, rows) {
  const cell = (x, i) => el("td", { class: i && typeof x === "string" ? "number" : "" }, x);
  return el("table", null, el("tr", null, ...heads.map((x) => el("th", null, x))),
    ...rows.map((row) => el("tr", null, ...row.map(cell))));
}

async function showCompare() {
  const other = data.runs[$("other").value], measure = $("difference").value;
  const header = nearest(other.traces, state.step);
  const theirs = header && await load($("other").value, header);
  const name = measure === "share" ? "loss share" : measure;
  const pairs = theirs && shown.trace ? matchPairs(shown.trace, theirs, name, Number($("update").value)) : [];
  const scale = scaleOf(name, pairs.flatMap((x) => x.values));
  const names = [run().name, other.name], steps = [shown.trace?.step ?? state.step, header?.step ?? state.step];
  $("compared").textContent = `${pairs.length} completions of the same prompts; steps ${steps.join(" and ")}`;
  legend("compare-legend", `${measure}: ${names.join(" − ")}`, scale,
    el("span", { class: "token differs" }, "other tokens"));
  shown.rows = { place: "pairs", items: pairs.map((x) => x.both),
    status: (row, column, t) => [`difference of ${name} ${number(pairs[row].values[t])}`] };
  lazy($("pairs"), pairs, ({ prompt, place, both, values, end }, row) => el("div", { class: "row" },
    place.endsWith(".0") ? el("div", null, picturesOf(both[0]), prompt) : "",
    el("div", { class: "side" }, ...both.map((c, column) => el("div", null, factsOf(c, `${names[column]} ${place}`),
      tokensOf(c, { from: c.start, values, scale, row, column, differs: (i) => i >= end }))))), 90);
  $("pairs").fill(0)?.querySelector(".token")?.setAttribute("tabindex", 0);
  const value = ([at, xs], step) => xs[at.indexOf(step)];
  const common = Object.keys(run().metrics).filter((x) => other.metrics[x]);
  $("metric-table").replaceChildren(table(["metric", ...names, "difference"], common.map((metric) => {
    const [a, b] = [run(), other].map((x, i) => value(x.metrics[metric], steps[i]));
    return [metric, number(a), number(b), number(a - b)];
  })));
  const bar = (x) => el("meter", { min: -1, max: 1, value: x, "aria-label": "cosine" });
  $("gradients").replaceChildren(...[run(), other].filter((x) => x.gradients).flatMap(({ name: of, gradients: g }) => [
    el("p", null, `${of}: norms ${g.norm.map((x) => number(x)).join(" and ")}`),
    table(["parameters", "cosine", ""], Object.entries(g.cosine).map(([part, x]) => [part, number(x, 6), bar(x)]))]));
  $("gradients").previousElementSibling.hidden = !$("gradients").firstChild;
}

// ---- what the controls do ----

function setGroup(group) {
  shown.group = group;
  state.group = group?.group ?? null;
  for (const node of $("list").querySelectorAll(".group")) node.setAttribute("aria-current", node.group === group);
  const row = state.tab === "data" ? shown.data?.findIndex((x) => x.group === group) : -1;
  if (row >= 0) $("data-rows").fill(row).scrollIntoView();
  if (state.tab === "trace") showTrace();
}

async function setStep(step) {
  const all = Object.values(run().metrics).flatMap(([steps]) => steps.slice(-1));
  state.step = step === Infinity ? Math.max(...all) : Math.min(step, Math.max(...all));
  state.follow = state.step === Math.max(...all);
  const header = nearest(run().traces, state.step);
  $("slider").max = Math.max(0, run().traces.length - 1);
  $("slider").value = run().traces.indexOf(header);
  $("where").textContent = `step ${state.step}${header ? `, trace of ${header.step}` : ", no traces"}`;
  shown.charts.forEach((chart) => { chart.redraw(false); chart.title(); });
  drawTimeline();
  const trace = header ? await load(state.run, header) : null;
  if (header !== nearest(run().traces, state.step)) return; // a later call was faster
  shown.trace = trace;
  shown.group = trace?.groups.find((x) => x.group === state.group) ?? null;
  const ends = new Set((trace?.groups ?? []).flatMap((g) => g.completions.map((c) => c.finish_reason)).filter(Boolean));
  options($("finish"), [["", "any end"], ...[...ends].map((x) => [x, x])], $("finish").value);
  show();
}

function show() {
  showGroups();
  if (state.tab === "trace") showTrace();
  if (state.tab === "data") showData();
  if (state.tab === "compare") showCompare();
}

function setTab(tab) {
  state.tab = tab;
  for (const [name, id] of [["trace", "trace"], ["data", "data-page"], ["compare", "compare"]]) {
    $(id).hidden = name !== tab;
    $(`tab-${name}`).setAttribute("aria-selected", name === tab);
  }
  document.body.className = tab;
  state.at = null;
  show();
}

function setRun(r) {
  state.run = r;
  document.title = $("title").textContent = `${run().script || "run"}: ${run().name}`;
  options($("other"), data.runs.flatMap((x, i) => (i === r ? [] : [[i, x.folder]])), $("other").value);
  return setStep(state.step);
}

function showMetricNames() {
  const names = [...new Set(data.runs.flatMap((x) => Object.keys(x.metrics)))].sort();
  $("metrics").replaceChildren(...names.filter((name) => name.includes($("find-metric").value)).map((name) => {
    const box = el("input", { type: "checkbox", onchange: () => {
      shown.metrics[box.checked ? "add" : "delete"](name);
      drawCharts();
    } });
    box.checked = shown.metrics.has(name);
    return el("label", null, box, ` ${name}`);
  }));
}

async function poll() {
  try {
    const answer = await fetch("data", { cache: "no-cache" });
    const tag = answer.headers.get("ETag");
    if (!answer.ok) throw new Error(await answer.text());
    if (tag !== shown.tag) {  // also at first: the data may have changed since the page was made
      data = await answer.json();
      cache.clear();
      drawCharts();
      await setRun(state.run, state.follow ? (state.step = Infinity) : 0);
    }
    shown.tag = tag;
  } catch (error) {
    $("status").textContent = `no new data: ${error.message}`;
  }
  setTimeout(poll, data.live * 1000);
}

function start() {
  options($("run"), data.runs.map((x, i) => [i, x.folder]), 0);
  options($("window"), [[0, "whole run"], [20, "20 steps"], [3, "3 steps"]], 3);
  $("run").parentNode.hidden = $("tab-compare").hidden = data.runs.length < 2;
  for (const name of ["trace", "data", "compare"]) $(`tab-${name}`).addEventListener("click", () => setTab(name));
  $("run").addEventListener("change", () => setRun(Number($("run").value)));
  const slide = (by) => {
    $("slider").value = Number($("slider").value) + by;
    setStep(run().traces[$("slider").value]?.step ?? state.step);
  };
  $("previous").addEventListener("click", () => slide(-1));
  $("next").addEventListener("click", () => slide(1));
  $("slider").addEventListener("input", () => slide(0));
  $("window").addEventListener("change", drawTimeline);
  $("find-metric").addEventListener("input", showMetricNames);
  for (const id of ["text", "order", "reward-low", "reward-high", "length-low", "length-high", "finish"]) {
    $(id).addEventListener("input", show);
  }
  for (const id of ["update", "quantity", "other", "difference"]) $(id).addEventListener("change", show);
  for (const id of ["rows", "data-rows", "pairs"]) {
    $(id).addEventListener("keydown", moveFocus);
    $(id).addEventListener("focusin", ({ target: { at } }) => at && focusToken(at.row, at.column, at.t));
    $(id).addEventListener("click", ({ target }) => { if (target.at) { target.focus(); openFormula(); } });
  }
  $("list").addEventListener("keydown", (event) => {
    const next = $("list").fill(event.target.index + ({ ArrowUp: -1, ArrowDown: 1 }[event.key] ?? NaN));
    if (next) [event.preventDefault(), next.focus()];
  });
  addEventListener("keydown", ({ key }) => { if (key === "Escape" && !$("formula").hidden) closeFormula(); });
  addEventListener("resize", () => { drawCharts(); drawTimeline(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  showMetricNames();
  drawCharts();
  setTab("trace");
  setRun(0).then(() => document.body.setAttribute("data-ready", ""));
  if (data.live) poll();
}

/** For tests and for pictures. */
const view = {
  audit: () => shown.trace.groups.map((group) => group.completions.map((c) => c.updates.map((_, u) => audit(
    shown.trace, group, c, u)))).flat(2),
  openLargest() {
    const { completions } = shown.group;
    const found = completions.flatMap((c, i) => (c.updates[0]?.share ?? [0]).map((x, t) => [Math.abs(x), i, t]));
    const [, row, t] = found.reduce((a, b) => (b[0] > a[0] ? b : a));
    focusToken(row, 0, t);
    openFormula();
  },
};
start();
