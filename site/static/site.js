"use strict";

// ---- a term of an equation and its fragment of code light up together ----

function light(event) {
  const hit = event.target instanceof Element && event.target.closest("[data-term]");
  for (const one of document.querySelectorAll("[data-term]")) {
    one.classList.toggle("lit", Boolean(hit) && one.dataset.term === hit.dataset.term);
  }
}
if (document.querySelector("[data-term]")) {
  for (const name of ["pointerover", "focusin"]) document.addEventListener(name, light);
}

// Boxes that scroll need the keyboard; headings of lists need a level, and regions a name.
addEventListener("load", () => {
  for (const box of document.querySelectorAll("pre, .table-wrapper, .equations, .sidebar-scroll, .toc-scroll")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }
});
for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
for (const [name, label] of [["sidebar", "Site"], ["toc", "On this page"]]) {
  document.querySelector(`.${name}-drawer`)?.setAttribute("aria-label", label);
}

// ---- sliders over tables of values (curves.js) ----

const COLOURS = { light: ["#0057b8", "#b3261e", "#1b6e3c"], dark: ["#7db8ff", "#ff9d94", "#7fd69b"] };
const DASHES = [[], [8, 4], [2, 3]];

function isDark() {
  const theme = document.body.dataset.theme;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

function element(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

// The row of a table that belongs to the positions of the sliders; the last setting is the fastest.
function row(line, positions) {
  return Object.entries(line.settings).reduce((index, [flag, steps]) => index * steps.length + positions[flag], 0);
}

function series(chart, positions, kind) {
  const found = [];
  for (const line of chart.lines) {
    const at = row(line, positions);
    const rows = kind === "value" ? { "": line.value[at] } : Object.fromEntries(
      Object.entries(line.gradients).map(([name, rows]) => [name, rows[at]]));
    const several = Object.keys(rows).length > 1;
    for (const [name, ys] of Object.entries(rows)) {
      found.push({ label: chart.lines.length > 1 ? line.label : several ? name : kind, ys });
    }
  }
  return found;
}

function plot(box, chart, positions, kind) {
  const found = series(chart, positions, kind);
  const ink = getComputedStyle(document.body).getPropertyValue("--color-foreground-primary");
  const grid = { stroke: isDark() ? "#444" : "#ddd", width: 1 };
  const colours = COLOURS[isDark() ? "dark" : "light"];
  const axis = { stroke: ink, grid, ticks: grid };
  const wrt = Object.keys(chart.lines[0].gradients).join(" and ");
  const title = kind === "value" ? "value" : `gradient with respect to ${wrt}`;
  const keys = found.map(({ label }, n) => {
    const key = element("span", {}, label);
    key.style.setProperty("--key", colours[n]);
    key.style.setProperty("--dash", ["solid", "dashed", "dotted"][n]);
    return key;
  });
  const canvas = element("div", {});
  box.replaceChildren(element("h3", {}, title), element("div", { className: "keys" }, ...keys), canvas);
  const ends = found.map(({ label, ys }) => `${label} from ${ys[0]} to ${ys[ys.length - 1]}`).join(", ");
  new uPlot({
    width: Math.max(200, box.clientWidth), height: 240, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, label: chart.x, labelSize: 20, size: 35 }, { ...axis, size: 55 }],
    series: [{}, ...found.map(({ label }, n) => ({ label, stroke: colours[n], dash: DASHES[n], width: 2, pxAlign: 0, points: { show: false } }))],
  }, [chart.xs, ...found.map(({ ys }) => ys)], canvas);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${title} over ${chart.x} from ${chart.xs[0]} to ${chart.xs[chart.xs.length - 1]}: ${ends}`);
  canvas.dataset.values = JSON.stringify(found.map(({ ys }) => ys[Math.floor(ys.length / 2)]));
}

function explorer(box) {
  const mine = CURVES.filter(({ group }) => group === box.dataset.group);
  const select = element("select", {}, ...mine.map(({ name }) => element("option", {}, name)));
  const sliders = element("div"), plots = element("div", { className: "plots" });
  const value = element("div"), gradient = element("div");
  plots.append(value, gradient);
  if (mine.length > 1) box.append(element("label", {}, element("span", {}, "loss"), select));
  box.append(sliders, plots);
  let positions = {};
  const draw = () => {
    const chart = mine[select.selectedIndex];
    plot(value, chart, positions, "value");
    plot(gradient, chart, positions, "gradient");
  };
  const choose = () => {
    const chart = mine[select.selectedIndex];
    positions = {};
    sliders.replaceChildren(...Object.entries(chart.settings).map(([flag, steps]) => {
      positions[flag] = chart.start[flag];
      const shown = element("output", {}, String(steps[chart.start[flag]]));
      const slider = element("input", { type: "range", min: 0, max: steps.length - 1, value: positions[flag], name: flag });
      const say = () => slider.setAttribute("aria-valuetext", String(steps[slider.value]));
      slider.addEventListener("input", () => {
        positions[flag] = Number(slider.value);
        shown.textContent = String(steps[slider.value]);
        say();
        draw();
      });
      say();
      return element("label", {}, element("span", {}, flag), slider, shown);
    }));
    draw();
  };
  select.addEventListener("change", choose);
  choose();
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
}
for (const box of document.querySelectorAll(".explorer")) explorer(box);
