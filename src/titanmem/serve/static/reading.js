// A text that was read: its tokens, the curves along them, and the numbers of the token under the cursor. The server's
// page and the report show the same.

import { aligned, brief, count, decimal, el, saveFile, spelt } from "./dom.js";
import { bulk, FIELDS } from "./trace.js";
import { LEVELS, TextPane } from "./text.js";
import { Curves } from "./curves.js";

const SHADES = { surprise: "surprise", nll: "−log p", change: "weight change" };
const MOST_LINES = 6; // layers that are drawn unasked

export class Reading {
  constructor(trace, title) {
    this.title = title;
    this.cursor = -1;
    this.text = new TextPane(trace, (place) => this.moveTo(place, "text"));
    this.curves = new Curves(trace, (place) => this.moveTo(place, "curves"));
    this.shade = el("select", { onchange: () => this.reshade() });
    for (const [value, name] of Object.entries(SHADES)) this.shade.append(el("option", { value }, name));
    this.low = el("output");
    this.high = el("output");
    const swatches = Array.from({ length: LEVELS }, (_, level) => el("i", { class: `s${level}` }));
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.exports = [button("PNG", "Save the curves as a PNG", () => this.savePicture()),
      button("CSV", "Save all numbers as CSV", () => this.saveTable())];
    this.zooms = [button("−", "See more of the text", () => this.curves.zoom(2)),
      button("+", "See less of the text, larger", () => this.curves.zoom(0.5)),
      button("whole", "See the whole text", () => this.seeAll())];
    this.log = el("input", { type: "checkbox", onchange: () => {
      this.curves.logarithmic = this.log.checked;
      this.curves.redraw();
    } });
    this.layers = el("fieldset", { class: "layers" }, el("legend", { class: "hidden" }, "Layers"));
    this.head = el("p", { class: "token" });
    this.body = el("tbody");
    const names = ["layer", ...FIELDS].map((name) => el("th", { scope: "col" }, name));
    this.element = el("section", { class: "reading", "aria-label": "What was read" },
      el("div", { class: "pane" },
        el("div", { class: "bar" },
          el("label", {}, "Shade by ", this.shade),
          el("span", { class: "scale" }, this.low, el("span", { class: "ramp", "aria-hidden": "true" }, ...swatches), this.high)),
        this.text.element),
      el("div", { class: "side" },
        el("div", { class: "bar" }, this.layers, el("label", {}, this.log, "log scale"), el("span", { class: "group" }, ...this.zooms), el("span", { class: "group" }, ...this.exports)),
        this.curves.element,
        el("div", { class: "numbers" }, this.head,
          el("div", { class: "scroll", role: "region", "aria-label": "Numbers of the token under the cursor", tabindex: 0 },
            el("table", {}, el("thead", {}, el("tr", {}, ...names)), this.body)))));
    for (const pane of [this.text.element, this.curves.element]) {
      pane.addEventListener("keydown", (event) => this.onKey(event, pane));
    }
    this.open(trace);
  }

  // Show another trace, from its beginning or its end.
  open(trace, atEnd = false) {
    this.trace = this.text.trace = this.curves.trace = trace;
    this.cursor = this.curves.cursor = -1;
    this.curves.whole();
    this.text.clear();
    this.listed = null;
    this.grown();
    if (atEnd) this.text.toEnd();
    else this.text.element.scrollTop = 0;
  }

  // The trace has more than before.
  grown() {
    this.listLayers();
    this.text.grow();
    this.reshade();
    this.curves.redraw();
    this.curves.element.setAttribute("aria-valuemax", Math.max(0, this.trace.length - 1));
    for (const button of [...this.exports, ...this.zooms]) button.disabled = this.trace.length === 0;
    if (this.cursor < 0) this.tell();
  }

  listLayers() {
    const names = this.trace.layers.join();
    if (names === this.listed) return;
    this.listed = names;
    if (this.trace.length && !names) this.shade.value = "nll"; // no memory, no surprise of one
    const every = Math.max(1, Math.ceil(this.trace.layers.length / MOST_LINES));
    this.curves.shown = new Set([...this.trace.layers.keys()].filter((position) => position % every === 0));
    const boxes = this.trace.layers.map((layer, position) => {
      const box = el("input", { type: "checkbox", checked: this.curves.shown.has(position) });
      box.addEventListener("change", () => {
        this.curves.shown[box.checked ? "add" : "delete"](position);
        this.curves.redraw();
      });
      return el("label", { class: `layer l${position % 6}` }, box, `layer ${layer}`);
    });
    this.layers.replaceChildren(this.layers.firstChild, ...boxes);
    this.body.replaceChildren();
  }

  reshade() {
    const column = { surprise: this.trace.mean, nll: this.trace.nll }[this.shade.value] ?? this.meanChange();
    const [low, high] = bulk(column);
    const step = (high - low) / LEVELS || 1;
    this.low.textContent = this.trace.length ? brief(low) : "";
    this.high.textContent = this.trace.length ? brief(high) : "";
    this.text.shade((place) => {
      const value = column.data[place];
      return Number.isNaN(value) ? 0 : Math.max(0, Math.min(LEVELS - 1, Math.floor((value - low) / step)));
    });
  }

  meanChange() {
    const rows = this.trace.fields.change, length = this.trace.length;
    const data = Float32Array.from({ length }, (_, i) => rows.reduce((sum, row) => sum + row.data[i], 0) / rows.length);
    return { data, length };
  }

  moveTo(place, from = "keys") {
    if (!this.trace.length) return;
    this.cursor = Math.max(0, Math.min(this.trace.length - 1, place));
    this.text.moveTo(this.cursor, from !== "text");
    this.curves.moveTo(this.cursor);
    this.tell();
  }

  tell() {
    const { trace, cursor } = this;
    const slider = this.curves.element;
    if (cursor < 0 || cursor >= trace.length) {
      this.head.textContent = trace.length
        ? "Point at a token or a curve, or move with the arrow keys."
        : "Nothing was read yet.";
      this.body.replaceChildren();
      slider.setAttribute("aria-valuetext", this.head.textContent);
      return;
    }
    const name = spelt(trace.texts[cursor], trace.ids[cursor]), nll = trace.nll.data[cursor];
    const chance = Number.isNaN(nll) ? "–" : `${(100 * Math.exp(-nll)).toPrecision(3)} %`;
    const fact = (label, value) => el("span", {}, `${label} `, el("b", {}, value));
    this.head.replaceChildren(el("code", {}, name), fact("token", count(trace.start + cursor)), fact("id", String(trace.ids[cursor])),
      fact("−log p", decimal(nll)), fact("p", chance));
    const columns = FIELDS.map((field) => aligned(trace.fields[field].map((column) => column.data[cursor])));
    this.body.replaceChildren(...trace.layers.map((layer, position) =>
      el("tr", {}, el("th", { scope: "row", class: `l${position % 6}` }, String(layer)), ...columns.map((column) => el("td", {}, column[position])))));
    slider.setAttribute("aria-valuenow", cursor);
    slider.setAttribute("aria-valuetext",
      `token ${trace.start + cursor} ${name}, surprise ${decimal(trace.mean.data[cursor])}, −log p ${decimal(nll)}`);
  }

  onKey(event, pane) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.trace.length) return;
    const [from, to] = this.curves.view, here = this.cursor < 0 ? from : this.cursor, far = event.shiftKey ? 10 : 1;
    const inText = pane === this.text.element && this.cursor >= 0;
    const places = {
      ArrowLeft: () => here - far,
      ArrowRight: () => (this.cursor < 0 ? here : here + far),
      ArrowUp: () => (inText ? this.text.vertical(-1) : here - 10),
      ArrowDown: () => (inText ? this.text.vertical(1) : here + 10),
      PageUp: () => here - Math.ceil((to - from) / 10),
      PageDown: () => here + Math.ceil((to - from) / 10),
      Home: () => 0,
      End: () => this.trace.length - 1,
    };
    const views = { "+": () => this.curves.zoom(0.5), "=": () => this.curves.zoom(0.5), "-": () => this.curves.zoom(2), 0: () => this.seeAll() };
    if (places[event.key]) this.moveTo(places[event.key]());
    else if (views[event.key]) views[event.key]();
    else return;
    event.preventDefault();
  }

  seeAll() {
    this.curves.whole();
    this.curves.redraw();
  }

  get fileName() {
    return this.title().replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "reading";
  }

  async savePicture() {
    saveFile(`${this.fileName}.png`, await this.curves.png(`${this.title()}, ${count(this.trace.length)} tokens`));
  }

  saveTable() {
    saveFile(`${this.fileName}.csv`, new Blob([this.trace.csv()], { type: "text/csv" }));
  }
}
