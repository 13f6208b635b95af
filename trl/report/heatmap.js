const PAGE = 12;
const radios = [...document.querySelectorAll("[name=measure]")];
const labels = radios.map((radio) => radio.nextElementSibling.textContent);
const inspector = $("inspector"), nothing = inspector.innerHTML;
let data = JSON.parse($("sample-data").textContent), page = 0;

/** −1..1: where a token's value lies on a measure's scale. */
const position = (value, index) => {
  const [centre, limit] = data.scales[radios[index].dataset.key];
  return value === null ? 0 : Math.max(-1, Math.min(1, (value - centre) / limit));
};
const sign = (polarity) => polarity === "positive" ? ["pos", "+"] : ["neg", "−"];

function paint() {
  const index = +radios.find((r) => r.checked).value, [centre, limit] = data.scales[radios[index].dataset.key];
  $("low").textContent = `${format(centre - limit)} or less`;
  $("high").textContent = `${format(centre + limit)} or more`;
  for (const token of document.querySelectorAll(".tok")) {
    const t = position(token.values[index + 1], index);
    token.style.setProperty("--t", Math.abs(t).toFixed(2));
    token.classList.toggle("pos", t > 0); token.classList.toggle("neg", t < 0); token.classList.toggle("strong", Math.abs(t) >= .5);
  }
}

/** Which characters of the response each quoted span covers: [start, end] or null where it is not there word for word. */
function places(tokens, spans) {
  const text = tokens.map((t) => t[0]).join("").toLowerCase();
  return spans.map(([quote]) => { const start = text.indexOf(quote.trim().toLowerCase()); return quote.trim() && start >= 0 ? [start, start + quote.trim().length] : null; });
}

function spanList(spans, isHere) {
  const list = make("ul", "spans");
  spans.forEach(([quote, polarity, label], i) => {
    const [name, symbol] = sign(polarity);
    list.append(make("li", isHere(i) ? `${name} here` : name, `${symbol} ${visible(quote)}${label ? ` (${visible(label)})` : ""}`));
  });
  return list;
}

/** Show a token's numbers, the spans (those over the token marked), and the critic's reply. */
function inspect(token, sample) {
  const [, , , , tokens, spans, reply, status] = sample, [text, ...values] = token.values, numbers = make("dl", "numbers");
  for (const old of document.querySelectorAll(".chosen")) old.classList.remove("chosen");
  token.classList.add("chosen"); token.closest(".sample").classList.add("chosen");
  values.forEach((value, i) => {
    const t = position(value, i), meter = make("dd", "meter"), bar = make("i", t < 0 ? "neg" : "pos");
    bar.style.width = `${Math.abs(t) * 50}%`; meter.append(bar); meter.setAttribute("aria-hidden", "true");
    numbers.append(make("dt", "", labels[i]), meter, make("dd", "value", format(value)));
  });
  const start = tokens.slice(0, token.index).reduce((sum, t) => sum + t[0].length, 0), end = start + text.length, found = places(tokens, spans);
  const close = make("button", "close", "Close"); close.type = "button"; close.addEventListener("click", shut);
  inspector.replaceChildren(make("div", "token", text ? `“${visible(text).replace(/\n/g, "")}”` : "no text of its own"), make("p", "note", `token ${token.index + 1} of ${tokens.length}`), close, numbers);
  inspector.append(make("h4", "", status ? `Critic: ${status}` : "No critic was asked"));
  if (spans.length) inspector.append(spanList(spans, (i) => found[i] && found[i][0] < end && found[i][1] > start));
  if (reply) { const raw = make("pre", "", visible(reply).replace(/↵\n/g, "\n")); raw.tabIndex = 0; raw.setAttribute("aria-label", "The critic's raw reply"); raw.setAttribute("role", "region"); inspector.append(make("h4", "", "Raw reply"), raw); }
}

function shut() {
  inspector.innerHTML = nothing;
  for (const old of document.querySelectorAll(".chosen")) old.classList.remove("chosen");
}

function tokenNodes(sample, response) {
  sample[4].forEach((values, i) => {
    const [, space, word] = values[0].match(/^( *)([^]*)$/); // a leading space stays uncoloured: it may wrap
    const token = make("span", "tok", visible(word || space) || "∅"); token.values = values; token.index = i; token.tabIndex = i ? -1 : 0;
    if (!values[0]) { token.classList.add("silent"); token.setAttribute("aria-label", "no text of its own"); }
    token.setAttribute("role", "option"); token.setAttribute("aria-selected", "false");
    token.addEventListener("pointerenter", () => inspect(token, sample));
    token.addEventListener("focus", () => {
      response.querySelector("[tabindex='0']").tabIndex = -1; token.tabIndex = 0; token.setAttribute("aria-selected", "true"); inspect(token, sample);
      $("spoken").textContent = labels.map((label, k) => `${label} ${format(values[k + 1])}`).join(", ");
    });
    token.addEventListener("blur", () => token.setAttribute("aria-selected", "false"));
    token.addEventListener("click", () => token.focus());
    token.addEventListener("keydown", (event) => {
      const to = { ArrowRight: token.nextElementSibling, ArrowDown: token.nextElementSibling, ArrowLeft: token.previousElementSibling, ArrowUp: token.previousElementSibling, Home: response.firstElementChild, End: response.lastElementChild }[event.key];
      if (to) { event.preventDefault(); to.focus(); }
    });
    response.append(word ? space : "", token);
  });
}

function card(sample) {
  const [, step, score, query, tokens, spans, reply, status] = sample;
  const box = make("article", "sample"), meta = make("div", "meta"), text = make("div", "text"), response = make("span", "response");
  meta.append(make("span", "score", `score ${format(score)}`), make("span", "", `step ${step}`), make("span", "", `${tokens.length} token${tokens.length === 1 ? "" : "s"}`));
  if (status) meta.append(make("span", "", `critic: ${status}`));
  text.dir = "auto"; // by the first letter; query and response are isolated from each other and from the rest
  response.setAttribute("role", "listbox"); response.setAttribute("aria-orientation", "horizontal"); response.setAttribute("aria-label", "Response tokens: arrow keys move");
  tokenNodes(sample, response);
  text.append(make("span", "query", visible(query))); if (tokens.length) text.append(response);
  const total = (i) => tokens.reduce((sum, token) => sum + (token[i] ?? 0), 0);
  box.append(meta, text, make("div", "sums", `sums: intrinsic ${format(total(1))} · KL ${format(total(2))}`));
  if (spans.length || reply) {
    const more = make("details");
    more.append(make("summary", "", spans.length ? `Critic quoted ${spans.length} span${spans.length > 1 ? "s" : ""}` : "Critic's reply"));
    if (spans.length) more.append(spanList(spans, () => false));
    if (reply) more.append(make("pre", "", visible(reply).replace(/↵\n/g, "\n")));
    box.append(more);
  }
  return box;
}

const ORDERS = { new: (a, b) => b[1] - a[1], old: (a, b) => a[1] - b[1], low: (a, b) => (a[2] ?? Infinity) - (b[2] ?? Infinity) || 0, high: (a, b) => (b[2] ?? -Infinity) - (a[2] ?? -Infinity) || 0 };

function drawSamples() {
  const mine = data.samples.filter((s) => s[0] === +$("run").value);
  const scored = mine.filter((s) => s[2] !== null), last = mine.reduce((most, s) => Math.max(most, s[1]), 0);
  const late = scored.filter((s) => s[1] >= last * .75), pool = late.length >= 6 ? late : scored;
  const ranked = [...pool].sort((a, b) => a[2] - b[2]), half = Math.min(3, ranked.length >> 1);
  $("extremes-note").textContent = half ? (pool === late ? "Of the last quarter of training." : "Of all steps.") : "Too few scored samples to rank.";
  $("worst").replaceChildren(...ranked.slice(0, half).map(card));
  $("best").replaceChildren(...ranked.slice(ranked.length - half).reverse().map(card));
  const wanted = $("find").value.toLowerCase();
  const holds = ([, , , query, tokens, spans, reply]) => [query, tokens.map((t) => t[0]).join(""), ...spans.map((s) => s[0]), reply ?? ""].some((part) => part.toLowerCase().includes(wanted));
  const sorted = mine.filter(holds).sort(ORDERS[$("order").value]);
  page = Math.min(page, Math.max(0, Math.ceil(sorted.length / PAGE) - 1));
  const shown = sorted.slice(page * PAGE, (page + 1) * PAGE);
  $("all").replaceChildren(...shown.map(card));
  $("where").textContent = shown.length ? `${page * PAGE + 1}–${page * PAGE + shown.length} of ${sorted.length}` : "no samples";
  $("back").disabled = page === 0; $("next").disabled = (page + 1) * PAGE >= sorted.length;
  paint();
}

/** Offer the runs that have samples; the chosen one stays chosen, at first the last. */
function buildSamples() {
  const chosen = $("run").value, has = curves.runs.map((run, i) => [run, i]).filter(([, i]) => data.samples.some((s) => s[0] === i));
  $("run").replaceChildren(...has.map(([run, i]) => { const option = make("option", "", run.name); option.value = i; return option; }));
  $("run").value = has.some(([, i]) => String(i) === chosen) ? chosen : String(has.at(-1)?.[1] ?? "");
  $("run").closest("label").hidden = has.length < 2;
  drawSamples();
}

const spoken = make("div", "hidden-text"); spoken.id = "spoken"; spoken.setAttribute("role", "status"); $("words").append(spoken);
radios.forEach((radio) => radio.addEventListener("change", paint));
for (const [id, event] of [["run", "change"], ["order", "change"], ["find", "input"]]) $(id).addEventListener(event, () => { page = 0; drawSamples(); });
const turn = (by) => { page += by; drawSamples(); $("samples").scrollIntoView(); $("samples").focus({ preventScroll: true }); };
$("back").addEventListener("click", () => turn(-1)); $("next").addEventListener("click", () => turn(1));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") shut(); });
buildSamples();
