"use strict";
// The calculator: kvlab.memory.estimate once more, in whole numbers (all stay below 2^53).
const DATA = JSON.parse(document.getElementById("data").textContent);
const ceilDiv = (a, b) => (a - (a % b)) / b + (a % b > 0 ? 1 : 0);
const rowBytes = ([bytes, block], values) => ceilDiv(values, block) * bytes;

function headsPerGpu(heads, tp) {
  if (tp <= heads && heads % tp === 0) return heads / tp;
  if (tp > heads && tp % heads === 0) return 1;
  throw new Error(`tensor_parallel=${tp} cannot divide ${heads} heads evenly, nor replicate them evenly`);
}

function layerBytes(layer, tokens, kv, tp) { // keys and values of one sequence in one layer
  if (layer.kind === "state") return 0;
  const kept = Math.min(tokens, layer.keep || tokens);
  const index = layer.index ? rowBytes(kv, layer.index) : 0;
  if (layer.kind === "latent") return kept * (rowBytes(kv, layer.width) + index);
  if (layer.kind === "compressed") {
    const summaries = Math.floor(tokens / layer.rate) * (rowBytes(kv, layer.width) + index);
    return kept * rowBytes(kv, layer.width) + summaries;
  }
  const heads = headsPerGpu(layer.heads, tp);
  return kept * (rowBytes(kv, heads * layer.k) + rowBytes(kv, heads * layer.v) + index);
}

function estimate(name, batch, length, kvDtype, weightsDtype, tp) {
  const model = DATA.models.find((m) => m.name === name), kv = DATA.kv[kvDtype];
  if (model.heads && model.heads % tp)
    throw new Error(`tensor_parallel=${tp} does not divide the model's ${model.heads} attention heads`);
  let cache = 0, state = 0, perToken = 0;
  for (const layer of model.layers) {
    const tokens = layer.kind === "cross" ? model.encoder : length;
    cache += layer.n * batch * layerBytes(layer, tokens, kv, tp);
    if (layer.kind !== "cross") perToken += layer.n * layerBytes(layer, 1, kv, tp);
    for (const [units, values] of layer.parts || []) state += 4 * layer.n * batch * headsPerGpu(units, tp) * values;
  }
  const weights = ceilDiv(rowBytes(DATA.weights[weightsDtype], model.params), tp);
  const tokens = Math.min(batch * length, Math.max(DATA.prefill, batch));
  const wide = 4 * model.hidden + ceilDiv(2 * model.ffn + 2 * model.hidden, tp);
  const logits = Math.floor((4 * batch * ceilDiv(model.vocab, tp) * tp) / tp);
  const activations = model.hidden ? 2 * tokens * wide + logits : 0;
  return {
    kv_cache_bytes: cache, state_bytes: state, kv_bytes_per_token: perToken, weights_bytes: weights,
    activation_bytes: activations, context_bytes: DATA.context,
    total_bytes: weights + cache + state + activations + DATA.context,
  };
}

function most(enough, limit = 2 ** 30) { // the largest n with enough(n): doubling, then halving; null when there is no limit
  if (!enough(1)) return 0;
  let low = 1;
  while (low < limit && enough(2 * low)) low *= 2;
  if (low >= limit) return null;
  let high = 2 * low;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (enough(middle)) low = middle; else high = middle;
  }
  return low;
}
const maxSeqLen = (name, room, batch, ...rest) =>
  most((n) => estimate(name, batch, n, ...rest).total_bytes <= room);
const maxBatch = (name, room, length, ...rest) =>
  most((n) => estimate(name, n, length, ...rest).total_bytes <= room);

// ---- numbers as kvlab writes them ----
function digits(value) { // three significant digits, ties to even, no whole digit dropped
  if (value === 0) return "0";
  const places = Math.max(2 - Math.floor(Math.log10(Math.abs(value)) + 1e-12), 0), y = value * 10 ** places;
  const whole = Math.abs(y % 1) === 0.5 ? 2 * Math.round(y / 2) : Math.round(y);
  return (whole / 10 ** places).toLocaleString("en-US", { maximumFractionDigits: places });
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = n, i = 0;
  while (Math.abs(value) >= 1023.5 && i < 5) { value /= 1024; i += 1; }
  return `${digits(value)} ${units[i]}`;
}
const count = (n) => n.toLocaleString("en-US");

// ---- the page ----
const BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256], LENGTHS = [];
for (let p = 7; p <= 20; p += 1) LENGTHS.push(2 ** p);
const el = (id) => document.getElementById(id);
const short = (name) => name.split("/").pop();

function choices(id, pairs, value) {
  for (const [text, key] of pairs) el(id).add(new Option(text, key, false, key === value));
}
function values() {
  return {
    model: el("model").value, batch: BATCHES[el("batch").value], length: LENGTHS[el("length").value],
    kv: el("kv").value, weights: el("weights").value, card: el("card").value, tp: Number(el("tp").value),
  };
}
function put(v) { // sets the controls; what they do not offer is ignored
  for (const id of ["model", "kv", "weights", "card", "tp"])
    if ([...el(id).options].some((o) => o.value === String(v[id]))) el(id).value = v[id];
  if (BATCHES.includes(Number(v.batch))) el("batch").value = BATCHES.indexOf(Number(v.batch));
  if (LENGTHS.includes(Number(v.length))) el("length").value = LENGTHS.indexOf(Number(v.length));
}

const SVG = (tag, attributes, words) =>
  `<${tag} ${Object.entries(attributes).map(([k, v]) => `${k}="${v}"`).join(" ")}>${words || ""}</${tag}>`;

function bar(e, room, wide) {
  const most_ = Math.max(e.total_bytes, room) * 1.02, x = (n) => (n / most_) * (wide - 2) + 1;
  let out = "", at = 0;
  for (const [name, n] of [["weights", e.weights_bytes], ["cache", e.kv_cache_bytes + e.state_bytes],
    ["rest", e.activation_bytes + e.context_bytes]]) {
    const from = x(at), to = x(at + n);
    out += SVG("rect", { x: from, y: 22, width: Math.max(to - from, 0.5), height: 34, style: `fill:var(--${name})` });
    at += n;
  }
  const edge = x(room), right = edge > wide / 2;
  out += SVG("line", { x1: edge, x2: edge, y1: 14, y2: 62, class: "limit" });
  out += SVG("text", { x: right ? edge - 5 : edge + 5, y: 14, "text-anchor": right ? "end" : "start", class: "alert" },
    `card: ${bytes(room)}`);
  return [out, 64];
}

function chart(v, room, wide) {
  const [left, right, top, bottom] = [64, wide - 64, 14, 252];
  const all = LENGTHS.map((n) => [n, estimate(v.model, v.batch, n, v.kv, v.weights, v.tp)]);
  const lines = {
    total: all.map(([n, e]) => [n, e.total_bytes]), weights: all.map(([n, e]) => [n, e.weights_bytes]),
    cache: all.map(([n, e]) => [n, e.kv_cache_bytes + e.state_bytes]),
  };
  const seen = [room, ...Object.values(lines).flat().map((p) => p[1]).filter((y) => y > 0)];
  const lo = Math.log2(Math.min(...seen)) - 0.4, hi = Math.log2(Math.max(...seen)) + 0.6;
  const X = (n) => left + ((Math.log2(n) - 7) / 13) * (right - left);
  const Y = (b) => bottom - ((Math.log2(b) - lo) / (hi - lo)) * (bottom - top);
  let out = SVG("rect", { x: left, y: top, width: right - left, height: Math.max(Y(room) - top, 0), class: "over" });
  const step = Math.ceil((hi - lo) / 6);
  for (let p = Math.ceil(lo / step) * step; p <= hi; p += step) {
    out += SVG("line", { x1: left, x2: right, y1: Y(2 ** p), y2: Y(2 ** p), class: "grid" });
    out += SVG("text", { x: left - 6, y: Y(2 ** p) + 4, "text-anchor": "end" }, bytes(2 ** p));
  }
  const every = Math.ceil(14 / ((right - left) / 62));
  LENGTHS.forEach((n, i) => {
    if (i % every === 0) out += SVG("text", { x: X(n), y: bottom + 18, "text-anchor": "middle" }, count(n));
  });
  out += SVG("line", { x1: left, x2: right, y1: Y(room), y2: Y(room), class: "limit" });
  out += SVG("text", { x: left + 5, y: Y(room) - 5, class: "alert" }, `card: ${bytes(room)}`);
  out += SVG("line", { x1: X(v.length), x2: X(v.length), y1: top, y2: bottom, class: "here" });
  const ends = Object.entries(lines).map(([name, points]) => ({ name, points: points.filter((p) => p[1] > 0) }))
    .filter((s) => s.points.length).sort((a, b) => b.points.at(-1)[1] - a.points.at(-1)[1]);
  let last = -Infinity;
  for (const s of ends) {
    out += SVG("polyline", { points: s.points.map(([n, b]) => `${X(n).toFixed(1)},${Y(b).toFixed(1)}`).join(" "),
      class: `line ${s.name}` });
    const now = s.points.find((p) => p[0] === v.length);
    out += SVG("circle", { cx: X(now[0]), cy: Y(now[1]), r: 4, class: `dot ${s.name}` });
    last = Math.max(Y(s.points.at(-1)[1]) + 4, last + 15);
    out += SVG("text", { x: right + 6, y: last, class: "name" }, s.name);
  }
  out += SVG("text", { x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle" }, "tokens of each sequence");
  return [out, bottom + 46];
}

function svg(id, [body, tall], wide, label) {
  el(id).innerHTML = `<svg role="img" aria-label="${label}" width="${wide}" height="${tall}" `
    + `viewBox="0 0 ${wide} ${tall}">${body}</svg>`;
}

function map(v, room) { // which batches of which lengths fit
  let head = `<tr><th scope="col">tokens</th>${BATCHES.map((b) => `<th scope="col">${b}</th>`).join("")}</tr>`;
  for (const n of LENGTHS.filter((_, i) => i % 2 === 1 || LENGTHS[i] === v.length)) {
    head += `<tr><th scope="row">${count(n)}</th>`;
    for (const b of BATCHES) {
      const fits = estimate(v.model, b, n, v.kv, v.weights, v.tp).total_bytes <= room;
      const here = b === v.batch && n === v.length ? " at" : "";
      head += `<td class="${fits ? "yes" : "no"}${here}">${fits ? "fits" : "–"}</td>`;
    }
    head += "</tr>";
  }
  el("map").innerHTML = head;
}

function draw() {
  const v = values(), room = DATA.cards.find((c) => c.name === v.card).bytes;
  el("batch-now").value = count(v.batch);
  el("length-now").value = `${count(v.length)} tokens`;
  el("batch").setAttribute("aria-valuetext", `${count(v.batch)} sequence${v.batch === 1 ? "" : "s"}`);
  el("length").setAttribute("aria-valuetext", `${count(v.length)} tokens`);
  try { history.replaceState(null, "", `#${new URLSearchParams(v)}`); } catch { /* a page without an address */ }
  let e;
  try {
    e = estimate(v.model, v.batch, v.length, v.kv, v.weights, v.tp);
  } catch (error) {
    el("verdict").className = "no";
    el("verdict").textContent = `This cannot be: ${error.message}.`;
    el("result").hidden = true;
    return;
  }
  el("result").hidden = false;
  const rest = [v.kv, v.weights, v.tp], fits = e.total_bytes <= room;
  const longest = maxSeqLen(v.model, room, v.batch, ...rest), largest = maxBatch(v.model, room, v.length, ...rest);
  const cache = e.kv_cache_bytes + e.state_bytes, each = v.tp > 1 ? `Each of ${v.tp} cards holds` : "Together";
  el("verdict").className = fits ? "yes" : "no";
  el("verdict").textContent = (fits
    ? `It fits: ${bytes(e.total_bytes)} of ${bytes(room)}; ${bytes(room - e.total_bytes)} stay free.`
    : `Out of memory: ${bytes(e.total_bytes)} needed, ${bytes(room)} there; ${bytes(e.total_bytes - room)} missing.`)
    + ` Weights ${bytes(e.weights_bytes)}, cache ${bytes(cache)}.`;
  const numbers = {
    weights: e.weights_bytes, cache: e.kv_cache_bytes, state: e.state_bytes, token: e.kv_bytes_per_token,
    rest: e.activation_bytes + e.context_bytes, total: e.total_bytes,
  };
  for (const [name, n] of Object.entries(numbers)) {
    el(`n-${name}`).textContent = bytes(n);
    el(`n-${name}`).dataset.bytes = n;
  }
  el("total-name").textContent = each;
  const said = (n, unit) => (n === null ? "no limit" : n === 0 ? "none fits" : `${count(n)} ${unit}${n === 1 ? "" : "s"}`);
  el("n-longest").textContent = said(longest, "token");
  el("n-largest").textContent = said(largest, "sequence");
  const model = DATA.models.find((m) => m.name === v.model), notes = [...model.notes];
  if (model.positions && v.length > model.positions)
    notes.push(`${short(v.model)} is made for ${count(model.positions)} positions`);
  el("notes").textContent = notes.length ? `${notes.join(". ")}.` : "";
  const wide = Math.max(el("bar").clientWidth, 240);
  svg("bar", bar(e, room, wide), wide, `Weights ${bytes(e.weights_bytes)}, cache ${bytes(cache)}, allowance `
    + `${bytes(numbers.rest)}, against ${bytes(room)} of the card.`);
  svg("chart", chart(v, room, wide), wide, `Bytes against tokens of each sequence, ${count(v.batch)} at once: total `
    + `${bytes(e.total_bytes)} and cache ${bytes(cache)} at ${count(v.length)} tokens; limit ${bytes(room)}.`);
  map(v, room);
}

choices("model", DATA.models.map((m) => [`${short(m.name)} (${m.name.split("/")[0]})`, m.name]), DATA.start.model);
choices("card", DATA.cards.map((c) => [`${c.name}: ${bytes(c.bytes)}`, c.name]), DATA.start.card);
choices("kv", Object.keys(DATA.kv).map((n) => [n, n]), DATA.start.kv);
choices("weights", Object.keys(DATA.weights).map((n) => [n, n]), DATA.start.weights);
choices("tp", [1, 2, 4, 8, 16].map((n) => [String(n), String(n)]), "1");
el("batch").max = BATCHES.length - 1;
el("length").max = LENGTHS.length - 1;
put(DATA.start);
put(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
el("controls").addEventListener("input", draw);
el("controls").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("resize", draw);
window.kvlab = { estimate, maxBatch, maxSeqLen, bytes, digits, put, draw, values };
draw();
