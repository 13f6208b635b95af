"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, name, text) => { const node = document.createElement(tag); if (name) node.className = name; if (text !== undefined) node.textContent = text; return node; };
const format = (x) => x === null || x === undefined ? "–" : (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3)))).replace("-", "−");
// what would act on the text around it, or be invisible, is shown as what it is
const visible = (text) => text.replace(/\r/g, "").replace(/\n/g, "↵\n").replace(/[\u202a-\u202e\u2066-\u2069]/g, (c) => `⟦U+${c.charCodeAt(0).toString(16).toUpperCase()}⟧`).replace(/[\0-\x08\x0b-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));

let curves = JSON.parse($("curve-data").textContent);
let axis = "step";
const hiddenArms = new Set();
/** CSS pixels of a holder in units of the drawings, which grow with the page's type. */
const widthOf = (holder, least) => Math.max(least, (holder.clientWidth || 360) / (parseFloat(getComputedStyle(document.documentElement).fontSize) / 16));
const LEFT = 48, RIGHT = 12, TOP = 10, BOTTOM = 40, TALL = 250;

const svg = (tag, attributes, parent) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent?.append(node);
  return node;
};
const points = (list) => list.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
const shapes = {
  circle: (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  square: (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  triangle: (x, y, r) => `M${x} ${y - 1.2 * r}l${1.2 * r} ${2.2 * r}h${-2.4 * r}z`,
  diamond: (x, y, r) => `M${x} ${y - 1.4 * r}l${1.4 * r} ${1.4 * r}l${-1.4 * r} ${1.4 * r}l${-1.4 * r} ${-1.4 * r}z`,
  cross: (x, y, r) => `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
  plus: (x, y, r) => `M${x - 1.2 * r} ${y}h${2.4 * r}m${-1.2 * r} ${-1.2 * r}v${2.4 * r}`,
};
const mark = (parent, arm, x, y) => svg("path", { d: shapes[arm.marker](x, y, 3.4), class: `mark hollow s${arm.colour}` }, parent);
const swatch = (arm) => {
  const box = svg("svg", { width: 34, height: 12, viewBox: "0 0 34 12", class: "swatch", "aria-hidden": "true" });
  svg("line", { x1: 1, x2: 33, y1: 6, y2: 6, "stroke-width": 2.6, "stroke-dasharray": arm.dash, class: `s${arm.colour}` }, box);
  mark(box, arm, 17, 6);
  return box;
};

/** Round tick positions (1, 2, 2.5, 5 × a power of ten) within low..high. */
function ticks(low, high, most) {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 2.5, 5, 10, 20].map((f) => f * power).find((s) => span / s <= most);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor((high - first * step) / step + 1e-9) + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Where an arm was on the chosen axis at a step, between the steps that are known. */
function along(arm, step) {
  const from = arm.at.step, to = arm.at[axis];
  let i = from.findIndex((s) => s >= step);
  if (i < 0) i = from.length - 1;
  if (i === 0 || from[i] === step) return to[i];
  return to[i - 1] + (to[i] - to[i - 1]) * (step - from[i - 1]) / (from[i] - from[i - 1]);
}
const spends = (arm) => axis === "step" || (arm.at[axis]?.at(-1) ?? 0) > 0;
const recorded = (arm) => axis in arm.at;

/** The visible lines of a chart: [arm, x, line]; x is null where the arm does not move on this axis. */
function visibleLines(chart) {
  return chart.lines.map((line, i) => [curves.arms[i], line, i]).filter(([arm, line, i]) => line && !hiddenArms.has(i) && recorded(arm))
    .map(([arm, line]) => ({ arm, line, x: spends(arm) ? line.x.map((s) => along(arm, s)) : null }));
}

function plot(holder, chart, lines) {
  const wide = widthOf(holder, 240), box = svg("svg", { viewBox: `0 0 ${wide} ${TALL}`, "aria-hidden": "true" });
  const moving = lines.filter((l) => l.x), target = curves.target?.chart === chart.key ? curves.target.value : null;
  const xs = moving.flatMap((l) => [...l.x, ...l.line.runs.flatMap(([steps]) => steps.map((s) => along(l.arm, s)))]);
  const ys = [...moving.flatMap((l) => [...l.line.y, ...l.line.low, ...l.line.high, ...l.line.runs.flatMap(([, v]) => v)]), ...lines.filter((l) => !l.x && l.line.y.length).map((l) => l.line.y.at(-1)), ...(target === null ? [] : [target])];
  if (!ys.length) { holder.replaceChildren(make("p", "note", "Nothing on this axis.")); return null; }
  const x0 = xs.length ? Math.min(...xs) : 0, x1 = xs.length ? Math.max(...xs) : 1;
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  const margin = .06 * (y1 - y0) || .1 * Math.abs(y1) || 1;
  y0 -= margin; y1 = chart.most === null ? y1 + margin : Math.min(y1 + margin, Math.max(y1, chart.most));
  const px = (x) => x1 === x0 ? (LEFT + wide - RIGHT) / 2 : LEFT + (x - x0) / (x1 - x0) * (wide - LEFT - RIGHT);
  const py = (y) => TALL - BOTTOM - (y - y0) / (y1 - y0) * (TALL - TOP - BOTTOM);
  for (const y of ticks(y0, y1, 5)) {
    svg("line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: py(y), y2: py(y) }, box);
    svg("text", { x: LEFT - 7, y: py(y) + 4, "text-anchor": "end" }, box).textContent = format(y);
  }
  svg("line", { class: "axis", x1: LEFT, x2: wide - RIGHT, y1: TALL - BOTTOM, y2: TALL - BOTTOM }, box);
  const whole = axis !== "usd", across = x1 === x0 ? [x0] : ticks(x0, x1, wide < 420 ? 4 : 6).filter((x) => !whole || Number.isInteger(x));
  for (const x of across) svg("text", { x: px(x), y: TALL - BOTTOM + 17, "text-anchor": "middle" }, box).textContent = format(x);
  svg("text", { x: (LEFT + wide - RIGHT) / 2, y: TALL - 5, "text-anchor": "middle" }, box).textContent = curves.axes[axis].toLowerCase();
  if (target !== null) svg("line", { class: "target", x1: LEFT, x2: wide - RIGHT, y1: py(target), y2: py(target) }, box);
  for (const { arm, line, x } of moving) {
    if (line.low.length) svg("path", { class: `band f${arm.colour}`, style: "fill: var(--c" + arm.colour + ")", d: points([...x.map((v, i) => [px(v), py(line.high[i])]), ...x.map((v, i) => [px(v), py(line.low[i])]).reverse()]) + "z" }, box);
    for (const [steps, values] of line.runs) {
      svg("path", { class: `thin s${arm.colour}`, d: points(steps.map((s, i) => [px(along(arm, s)), py(values[i])])) }, box);
      if (steps.length === 1) mark(box, arm, px(along(arm, steps[0])), py(values[0]));
    }
  }
  for (const { arm, line, x } of lines) {
    if (!line.y.length) continue;
    if (!x) { svg("path", { class: `flat s${arm.colour}`, "stroke-dasharray": arm.dash || "none", d: points([[LEFT, py(line.y.at(-1))], [wide - RIGHT, py(line.y.at(-1))]]) }, box); mark(box, arm, wide - RIGHT - 4, py(line.y.at(-1))); continue; }
    svg("path", { class: `bold s${arm.colour}`, "stroke-dasharray": arm.dash || "none", d: points(x.map((v, i) => [px(v), py(line.y[i])])) }, box);
    const every = Math.max(1, Math.floor(x.length / 6));
    x.forEach((v, i) => { if (x.length <= 12 || (i + Math.floor(every / 2)) % every === 0) mark(box, arm, px(v), py(line.y[i])); });
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: TALL - BOTTOM }, box);
  holder.replaceChildren(box);
  return { px, cross, wide, x0, x1, moving };
}

function figure(chart) {
  const box = make("figure"), holder = make("div", "plot"), caption = make("figcaption");
  box.append(make("h3", "", chart.title), make("div", "note", chart.note), holder, caption);
  const draw = () => {
    const lines = visibleLines(chart), drawn = plot(holder, chart, lines);
    const rest = lines.map(({ line, x, arm }) => !line.y.length ? "–" : !x ? `ends at ${format(line.y.at(-1))}` : `${format(line.y[0])} → ${format(line.y.at(-1))}`);
    const outputs = rest.map((text) => make("b", "", text));
    caption.replaceChildren(...lines.map(({ arm }, i) => { const row = make("div"); row.append(swatch(arm), make("bdi", "", arm.name), outputs[i]); return row; }));
    const stops = drawn ? [...new Set(drawn.moving.flatMap((l) => l.x))].sort((a, b) => a - b) : [];
    let now = stops.length - 1;
    const show = (i) => {
      now = Math.max(0, Math.min(stops.length - 1, i));
      const at = stops[now];
      lines.forEach(({ line, x }, k) => {
        if (!x || !x.length) return;
        const near = x.reduce((best, v, j) => Math.abs(v - at) < Math.abs(x[best] - at) ? j : best, 0);
        const spread = line.low.length ? ` ± ${format((line.high[near] - line.low[near]) / 2)}` : "";
        outputs[k].textContent = at > x.at(-1) ? `ended at ${format(line.y.at(-1))}` : `${format(x[near])}: ${format(line.y[near])}${spread}`;
      });
      drawn.cross.setAttribute("x1", drawn.px(at)); drawn.cross.setAttribute("x2", drawn.px(at)); drawn.cross.style.visibility = "visible";
      describe();
    };
    const hide = () => { if (drawn) drawn.cross.style.visibility = "hidden"; outputs.forEach((o, i) => { o.textContent = rest[i]; }); };
    const describe = () => {
      holder.setAttribute("aria-valuenow", stops[now]);
      holder.setAttribute("aria-valuetext", lines.map(({ arm }, i) => `${arm.name} ${outputs[i].textContent}`).join(", "));
    };
    if (!stops.length) { for (const name of ["role", "tabindex", "aria-label", "aria-valuemin", "aria-valuemax", "aria-valuenow", "aria-valuetext"]) holder.removeAttribute(name); return; }
    for (const [key, value] of Object.entries({ role: "slider", tabindex: 0, "aria-label": `${chart.title} over ${curves.axes[axis].toLowerCase()}`, "aria-valuemin": stops[0], "aria-valuemax": stops.at(-1) })) holder.setAttribute(key, value);
    describe();
    holder.onpointermove = (event) => {
      const rect = holder.getBoundingClientRect(), x = (event.clientX - rect.left) * drawn.wide / rect.width;
      show(stops.reduce((best, v, i) => Math.abs(drawn.px(v) - x) < Math.abs(drawn.px(stops[best]) - x) ? i : best, 0));
    };
    holder.onpointerleave = holder.onblur = hide;
    holder.onfocus = () => { if (holder.matches(":focus-visible")) show(now); };
    holder.onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10, Home: -1e9, End: 1e9 }[event.key];
      if (by) { event.preventDefault(); show(now + by); }
    };
  };
  return { box, draw };
}

let figures = [], otherFigures = [];

function drawReach() {
  const holder = $("reach");
  if (!holder || !curves.efficiency.length) return;
  const rows = curves.reached.map((index, i) => ({ arm: curves.arms[index], index, runs: curves.efficiency[i] })).filter((r) => !hiddenArms.has(r.index));
  const box = make("figure"); holder.replaceChildren(box);
  const wide = widthOf(box, 294) - 34, tall = 58 * rows.length + 40;
  const known = rows.flatMap((r) => r.runs.map((run) => run.at[axis])).filter((v) => v !== undefined), most = Math.max(...known, 0) * 1.06 || 1;
  const px = (x) => 8 + x / most * (wide - 60), image = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", width: "100%" });
  for (const x of ticks(0, most, wide < 420 ? 4 : 6)) {
    svg("line", { class: "grid", x1: px(x), x2: px(x), y1: 0, y2: tall - 36 }, image);
    svg("text", { x: px(x), y: tall - 20, "text-anchor": "middle" }, image).textContent = format(x);
  }
  svg("text", { x: px(most / 2), y: tall - 4, "text-anchor": "middle" }, image).textContent = `${axis === "step" ? "steps" : curves.axes[axis].toLowerCase()} until ${curves.target.name}'s final reward, ${format(curves.target.value)}`;
  const said = rows.map(({ arm, runs }, i) => {
    const there = runs.map((r) => r.at[axis]).filter((v) => v !== undefined), mean = there.reduce((a, b) => a + b, 0) / there.length, y = 58 * i + 40;
    const missed = runs.length - there.length, words = there.length ? format(mean) + (missed ? `, ${missed} of ${runs.length} runs never` : "") : "never reached";
    const label = svg("text", { x: px(0), y: y - 16, class: "strong" }, image);
    label.textContent = `\u2068${arm.name}\u2069: ${words}`;
    if (there.length) svg("line", { x1: px(0), x2: px(mean), y1: y, y2: y, class: `s${arm.colour}`, "stroke-width": 8, opacity: .35 }, image);
    for (const v of there) mark(image, arm, px(v), y);
    return `${arm.name}: ${words}`;
  });
  image.setAttribute("aria-label", `${curves.axes[axis]} until the baseline's final reward. ${said.join(". ")}`);
  box.append(image);
}

function drawCurves() {
  figures.forEach((f) => f.draw());
  if ($("more").open) otherFigures.forEach((f) => f.draw());
  drawReach();
  const absent = curves.arms.filter((arm) => !recorded(arm)), still = curves.arms.filter((arm) => recorded(arm) && !spends(arm)), words = [];
  if (still.length) words.push(`${still.map((a) => a.name).join(", ")}: none spent; drawn as a level line at its last value.`);
  if (absent.length) words.push(`${absent.map((a) => a.name).join(", ")}: not recorded on this axis.`);
  $("axis-note").textContent = words.join(" "); $("axis-note").hidden = !words.length;
}

/** Build controls and figures from `curves`; what the reader chose stays chosen. */
function buildCurves() {
  if (!(axis in curves.axes)) axis = "step";
  const choice = (type, name, checked, change, ...content) => {
    const label = make("label", "pill"), input = make("input"), text = make("span");
    Object.assign(input, { type, name, checked }); input.addEventListener("change", () => change(input));
    text.append(...content); label.append(input, text);
    return label;
  };
  const keep = (id) => $(id).querySelector("legend");
  $("axis").replaceChildren(keep("axis"), ...Object.entries(curves.axes).map(([key, label]) => choice("radio", "axis", key === axis, () => { axis = key; drawCurves(); }, label)));
  $("toggles").replaceChildren(keep("toggles"), ...curves.arms.map((arm, i) => choice("checkbox", `arm${i}`, !hiddenArms.has(i), (input) => { hiddenArms[input.checked ? "delete" : "add"](i); drawCurves(); }, swatch(arm), make("bdi", "", arm.name))));
  $("toggles").hidden = curves.arms.length < 2; $("axis").hidden = Object.keys(curves.axes).length < 2;
  figures = curves.charts.map(figure); otherFigures = curves.others.map(figure);
  $("charts").replaceChildren(...figures.map((f) => f.box)); $("others").replaceChildren(...otherFigures.map((f) => f.box));
  if (!figures.length) $("charts").replaceChildren(make("p", "note", "No metrics were logged."));
  $("more").hidden = !otherFigures.length; $("more").querySelector("summary").textContent = `${otherFigures.length} more metrics`;
  drawCurves();
}

for (const radio of document.querySelectorAll("[name=theme]"))
  radio.addEventListener("change", () => { if (radio.value === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = radio.value; });
$("more").addEventListener("toggle", drawCurves);
let drawnWidth = 0;
new ResizeObserver(([entry]) => { if (Math.abs(entry.contentRect.width - drawnWidth) > 1) { drawnWidth = entry.contentRect.width; drawCurves(); } }).observe($("charts"));
buildCurves();
