// Small multiples along the text: one panel per number, one line per layer. Where there are more tokens than the eye can
// tell apart the line is their mean, and the band behind it one standard deviation either way.

import { brief, count, el } from "./dom.js";
import { stretches } from "./trace.js";

const PANELS = [
  { name: "surprise", title: "surprise", about: "size of the gradient", zero: true },
  { name: "change", title: "weight change", about: "by this token", zero: true },
  { name: "step", title: "step θ", about: "how much is learnt" },
  { name: "momentum", title: "momentum η", about: "how much surprise is carried on" },
  { name: "forget", title: "forget α", about: "how much is let go" },
  { name: "nll", title: "−log p", about: "of the token, by the model", zero: true },
  { name: "loss", title: "memory’s loss", about: "before the token is learnt", zero: true },
];
const COLOURS = 6;
const GUTTER = 48, TOP = 15, GAP = 9, RIGHT = 8, BOTTOM = 18;
const SHORTEST = 24; // tokens in view

export function layerColour(style, position) {
  return style.getPropertyValue(`--layer-${position % COLOURS}`).trim();
}

// What a panel's scale must hold: all means, and nearly all of the bands.
function reach(lines) {
  const known = (arrays) => arrays.flatMap((array) => Array.from(array).filter((value) => !Number.isNaN(value))).sort((a, b) => a - b);
  const means = known(lines.map(({ mean }) => mean));
  const low = known(lines.map(({ low }) => low)), high = known(lines.map(({ high }) => high));
  const nearly = (values, share) => values[Math.round(share * (values.length - 1))];
  return [Math.min(means[0], nearly(low, 0.02)), Math.max(means.at(-1), nearly(high, 0.98))];
}

export class Curves {
  constructor(trace, onPoint) {
    this.trace = trace;
    this.shown = new Set();
    this.logarithmic = false;
    this.cursor = -1;
    this.whole();
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.line = el("div", { class: "line", hidden: true });
    this.element = el(
      "div",
      {
        class: "curves", tabindex: 0, role: "slider", "aria-label": "Place in the text", "aria-valuemin": 0,
        "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "nothing was read yet",
      },
      this.canvas,
      this.line,
    );
    const point = (event) => {
      const place = this.placeAt(event.clientX - this.canvas.getBoundingClientRect().left);
      if (place !== null) onPoint(place);
    };
    this.element.addEventListener("pointermove", point);
    this.element.addEventListener("pointerdown", point);
    new ResizeObserver(() => this.redraw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  whole() {
    this.size = Infinity; // tokens in view
    this.first = 0;
  }

  get view() {
    const length = this.trace.length, size = Math.min(this.size, length);
    const first = Math.max(0, Math.min(this.first, length - size));
    return [first, first + size];
  }

  zoom(factor) {
    const [from, to] = this.view;
    const size = Math.max(SHORTEST, Math.round((to - from) * factor));
    const middle = this.cursor >= from && this.cursor < to ? this.cursor : (from + to) / 2;
    this.first = Math.round(middle - size / 2);
    this.size = size >= this.trace.length ? Infinity : size;
    this.redraw();
  }

  moveTo(place) {
    this.cursor = place;
    const [from, to] = this.view;
    if (place >= 0 && (place < from || place >= to)) {
      this.first = Math.round(place - (to - from) / 2);
      this.redraw();
    }
    this.placeLine();
  }

  placeAt(x) {
    const [from, to] = this.view;
    if (from === to) return null;
    const share = (x - GUTTER) / Math.max(1, this.canvas.clientWidth - GUTTER - RIGHT);
    return Math.max(from, Math.min(to - 1, from + Math.floor(share * (to - from))));
  }

  placeLine() {
    const [from, to] = this.view;
    this.line.hidden = this.cursor < from || this.cursor >= to;
    const wide = this.canvas.clientWidth - GUTTER - RIGHT;
    this.line.style.transform = `translateX(${GUTTER + ((this.cursor - from + 0.5) / (to - from)) * wide}px)`;
  }

  redraw() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      const { clientWidth: width, clientHeight: height } = this.element;
      if (!width || !height) return;
      const scale = devicePixelRatio || 1;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      const pen = this.canvas.getContext("2d");
      pen.scale(scale, scale);
      this.draw(pen, width, height);
      this.placeLine();
    });
  }

  draw(pen, width, height) {
    const style = getComputedStyle(this.element);
    const ink = style.getPropertyValue("--ink"), quiet = style.getPropertyValue("--quiet");
    const [from, to] = this.view;
    const high = (height - BOTTOM) / PANELS.length;
    PANELS.forEach((panel, number) => {
      const box = { x: GUTTER, y: number * high + TOP, width: width - GUTTER - RIGHT, height: high - TOP - GAP };
      pen.font = "600 11px system-ui, sans-serif";
      pen.textAlign = "left";
      pen.fillStyle = ink;
      pen.fillText(panel.title, box.x, box.y - 5);
      const after = box.x + pen.measureText(panel.title).width + 7;
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = quiet;
      pen.fillText(panel.about, after, box.y - 5);
      pen.fillStyle = style.getPropertyValue("--panel");
      pen.fillRect(box.x, box.y, box.width, box.height);
      if (from < to) this.drawPanel(pen, panel, box, style, quiet);
    });
    pen.fillStyle = quiet;
    const ends = [[from, "left", GUTTER], [to - 1, "right", width - RIGHT]];
    if (from < to) {
      for (const [place, side, x] of ends) {
        pen.textAlign = side;
        pen.fillText(`${side === "left" ? "token " : ""}${count(this.trace.start + place)}`, x, height - 5);
      }
    }
  }

  drawPanel(pen, panel, box, style, quiet) {
    const [from, to] = this.view;
    const bins = Math.max(1, Math.min(Math.floor(box.width / 3), to - from));
    const lines = this.trace.columns(panel.name)
      .map((column, position) => ({ position, ...stretches(column, from, to, bins) }))
      .filter(({ position }) => panel.name === "nll" || this.shown.has(position));
    let [least, most] = reach(lines);
    if (!Number.isFinite(least) || !Number.isFinite(most)) return;
    const bend = this.logarithmic && most > 0;
    if (bend) least = Math.max(least, most / 1e6);
    else if (panel.zero) least = Math.min(0, least);
    const labels = [brief(least), brief(most)];
    const height = bend ? (value) => Math.log(Math.max(value, least)) : (value) => value;
    [least, most] = [height(least), height(most)];
    if (most - least < 1e-9 * Math.max(1, Math.abs(most))) [least, most] = [least - 0.5, most + 0.5];
    const x = (bin) => box.x + ((bin + 0.5) / bins) * box.width;
    const y = (value) => box.y + box.height * (1 - (height(value) - least) / (most - least));
    pen.fillStyle = quiet;
    pen.textAlign = "right";
    pen.fillText(labels[1], box.x - 5, box.y + 9);
    pen.fillText(labels[0], box.x - 5, box.y + box.height);
    pen.save();
    pen.beginPath();
    pen.rect(box.x, box.y, box.width, box.height);
    pen.clip();
    pen.lineJoin = "round";
    for (const { position, low, high, mean } of lines) {
      const colour = panel.name === "nll" ? style.getPropertyValue("--ink") : layerColour(style, position);
      if (to - from > bins) {
        pen.globalAlpha = 0.13;
        pen.fillStyle = colour;
        for (let bin = 0; bin < bins; bin++) {
          const top = y(high[bin]);
          pen.fillRect(x(bin) - box.width / bins / 2, top, box.width / bins, Math.max(0.5, y(low[bin]) - top));
        }
      }
      pen.globalAlpha = 1;
      pen.strokeStyle = colour;
      pen.lineWidth = 1.25;
      pen.setLineDash(position >= COLOURS ? [4, 3] : []);
      pen.beginPath();
      for (let bin = 0, open = false; bin < bins; bin++) {
        const known = !Number.isNaN(mean[bin]);
        if (known && open) pen.lineTo(x(bin), y(mean[bin]));
        else if (known) pen.moveTo(x(bin), y(mean[bin]));
        open = known;
      }
      pen.stroke();
    }
    pen.restore();
  }

  // The curves as a picture, twice as fine, with a legend.
  async png(title) {
    const width = Math.max(760, this.element.clientWidth), height = Math.max(480, this.element.clientHeight), head = 34;
    const picture = el("canvas", { width: 2 * (width + 16), height: 2 * (height + head + 8) });
    const pen = picture.getContext("2d");
    const style = getComputedStyle(this.element);
    pen.scale(2, 2);
    pen.fillStyle = style.getPropertyValue("--page");
    pen.fillRect(0, 0, width + 16, height + head + 8);
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.fillText(title, GUTTER, 20);
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "right";
    let right = width - RIGHT;
    for (const position of [...this.shown].sort((a, b) => b - a)) {
      const name = `layer ${this.trace.layers[position]}`;
      pen.fillStyle = style.getPropertyValue("--quiet");
      pen.fillText(name, right, 20);
      right -= pen.measureText(name).width + 18;
      pen.fillStyle = layerColour(style, position);
      pen.fillRect(right, 14, 12, 4);
      right -= 14;
    }
    pen.translate(0, head);
    this.draw(pen, width, height);
    return new Promise((done) => picture.toBlob(done, "image/png"));
  }
}
