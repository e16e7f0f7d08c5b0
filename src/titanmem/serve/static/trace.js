// What a text did to the memories: columns that grow piece by piece (infer/trace.py has the shape).

export const FIELDS = ["surprise", "change", "step", "momentum", "forget", "loss"];

// Numbers in a growing buffer; what is missing is NaN.
class Column {
  constructor() {
    this.data = new Float32Array(1024);
    this.length = 0;
  }

  push(values) {
    const needed = this.length + values.length;
    if (needed > this.data.length) {
      const larger = new Float32Array(Math.max(needed, 2 * this.data.length));
      larger.set(this.data.subarray(0, this.length));
      this.data = larger;
    }
    for (const value of values) this.data[this.length++] = value ?? NaN;
  }
}

export class Trace {
  constructor() {
    this.clear();
  }

  clear() {
    this.start = 0;
    this.layers = [];
    this.ids = [];
    this.texts = [];
    this.nll = new Column();
    this.mean = new Column(); // surprise, the mean over the layers
    this.fields = Object.fromEntries(FIELDS.map((name) => [name, []]));
  }

  get length() {
    return this.ids.length;
  }

  get end() {
    return this.start + this.length;
  }

  // A piece behind the others; one from elsewhere starts anew. Returns whether it did.
  add(piece) {
    const anew = this.length === 0 || piece.start !== this.end || piece.layers.length !== this.layers.length;
    if (anew) {
      this.clear();
      this.start = piece.start;
      this.layers = piece.layers;
      for (const name of FIELDS) this.fields[name] = piece.layers.map(() => new Column());
    }
    for (let i = 0; i < piece.ids.length; i++) {
      this.ids.push(piece.ids[i]);
      this.texts.push(piece.texts[i]);
    }
    this.nll.push(piece.nll);
    for (const name of FIELDS) piece.fields[name].forEach((values, layer) => this.fields[name][layer].push(values));
    const rows = piece.fields.surprise;
    this.mean.push(piece.ids.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / Math.max(rows.length, 1)));
    return anew;
  }

  // Only the tokens before `end` stay, which counts from the session's first.
  cut(end) {
    const length = Math.max(0, Math.min(this.length, end - this.start));
    this.ids.length = this.texts.length = length;
    for (const column of [this.nll, this.mean, ...FIELDS.flatMap((name) => this.fields[name])]) column.length = length;
  }

  copy() {
    const other = new Trace();
    if (this.length) other.add(this.plain());
    return other;
  }

  plain() {
    const list = (column) => Array.from(column.data.subarray(0, column.length));
    const fields = Object.fromEntries(FIELDS.map((name) => [name, this.fields[name].map(list)]));
    return { start: this.start, layers: this.layers, ids: this.ids, texts: this.texts, nll: list(this.nll), fields };
  }

  // The lines of a curve: one per layer, or the model's own −log p.
  columns(name) {
    return name === "nll" ? [this.nll] : this.fields[name];
  }

  csv() {
    const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const digits = (value) => (Number.isNaN(value) ? "" : String(Number(value.toPrecision(5))));
    const names = this.layers.flatMap((layer) => FIELDS.map((name) => `${name}_${layer}`));
    const lines = [["token", "id", "text", "nll", "surprise", ...names].join(",")];
    for (let i = 0; i < this.length; i++) {
      const numbers = this.layers.flatMap((_, layer) => FIELDS.map((name) => digits(this.fields[name][layer].data[i])));
      const first = [this.start + i, this.ids[i], quoted(this.texts[i]), digits(this.nll.data[i]), digits(this.mean.data[i])];
      lines.push([...first, ...numbers].join(","));
    }
    return lines.join("\r\n") + "\r\n";
  }
}

// The values between which most of a column lies: 2 and 98 in a hundred.
export function bulk(column) {
  const stride = Math.max(1, Math.floor(column.length / 4000));
  const values = [];
  for (let i = 0; i < column.length; i += stride) if (!Number.isNaN(column.data[i])) values.push(column.data[i]);
  if (!values.length) return [0, 1];
  values.sort((a, b) => a - b);
  const at = (share) => values[Math.round(share * (values.length - 1))];
  return [at(0.02), at(0.98)];
}

// Of each of `bins` stretches of [from, to) the mean, and what lies one standard deviation below and above it, but no
// farther than its lowest and highest.
export function stretches(column, from, to, bins) {
  const low = new Float32Array(bins), high = new Float32Array(bins), mean = new Float32Array(bins);
  for (let bin = 0; bin < bins; bin++) {
    const first = from + Math.floor(((to - from) * bin) / bins);
    const last = Math.max(first + 1, from + Math.floor(((to - from) * (bin + 1)) / bins));
    let least = Infinity, most = -Infinity, sum = 0, squares = 0, counted = 0;
    for (let i = first; i < last && i < column.length; i++) {
      const value = column.data[i];
      if (Number.isNaN(value)) continue;
      if (value < least) least = value;
      if (value > most) most = value;
      sum += value;
      squares += value * value;
      counted++;
    }
    const middle = sum / counted, spread = Math.sqrt(Math.max(0, squares / counted - middle * middle));
    low[bin] = Math.max(least, middle - spread); // NaN where there is nothing
    high[bin] = Math.min(most, middle + spread);
    mean[bin] = middle;
  }
  return { low, high, mean };
}
