// Sessions as a tree of forks, what can be done to the open one, and how far two are apart.

import { aligned, brief, byId, count, el } from "./dom.js";

export class Sessions {
  // `sure(text, yes)` asks before something is lost.
  constructor(desk, sure) {
    this.desk = desk;
    this.sure = sure;
    desk.addEventListener("sessions", () => this.showTree());
    desk.addEventListener("session", () => this.showAll());
    desk.addEventListener("trace", () => (this.tokens.textContent = count(desk.info.tokens)));
    byId("maker").addEventListener("submit", (event) => {
      event.preventDefault();
      this.attempt(byId("maker-error"), async () => {
        await desk.create(byId("new-name").value.trim());
        byId("new-name").value = "";
      });
    });
    byId("differ").addEventListener("submit", (event) => {
      event.preventDefault();
      this.compare();
    });
  }

  async attempt(error, act) {
    error.textContent = "";
    try {
      await act();
    } catch (problem) {
      error.textContent = problem.message;
    }
  }

  showAll() {
    this.showTree();
    this.showDetail();
  }

  showTree() {
    const { desk } = this;
    const list = (nodes) => el("ul", {}, ...nodes.map((node) => {
      const open = desk.info?.name === node.name;
      const name = el("button", { type: "button", class: "name", "aria-current": open && "true",
        onclick: () => this.attempt(byId("maker-error"), () => desk.open(node.name)) }, node.name);
      const facts = `${count(node.tokens)} tokens${node.forked_at == null ? "" : `, forked at ${count(node.forked_at)}`}${node.policy === "frozen" ? ", frozen" : ""}`;
      const line = el("div", { class: "node" }, name, el("span", { class: "quiet" }, facts));
      return el("li", {}, line, ...(node.forks.length ? [list(node.forks)] : []));
    }));
    const empty = el("p", { class: "quiet" }, "There is none yet. Create one here, or read a text: it makes its own.");
    byId("tree").replaceChildren(desk.tree.length ? list(desk.tree) : empty);
    const { names } = desk, [one, other] = [byId("one"), byId("other")];
    for (const choice of [one, other]) {
      const before = choice.value;
      choice.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      choice.value = names.includes(before) ? before : names[0] ?? "";
    }
    if (one.value === other.value && names.length > 1) {
      other.value = [desk.info?.name, ...names].find((name) => name && name !== one.value);
    }
  }

  showDetail() {
    const { desk } = this, { info } = desk, box = byId("detail");
    if (!info) {
      box.replaceChildren(el("h2", {}, "No session is open"));
      return;
    }
    const error = el("p", { class: "error", role: "alert" });
    const button = (text, act) => el("button", { type: "button", onclick: () => this.attempt(error, act) }, text);
    const form = (act, ...children) => el("form", { class: "bar", onsubmit: (event) => {
      event.preventDefault();
      this.attempt(error, act);
    } }, ...children);
    const fact = (label, value) => [el("dt", {}, label), el("dd", {}, value)];
    const copy = el("input", { maxlength: 100, placeholder: "name, or none", autocomplete: "off" });
    const mark = el("input", { maxlength: 100, placeholder: "name, or none", autocomplete: "off" });
    const back = el("select", {}, ...Object.entries(info.marks).map(([name, tokens]) => el("option", { value: name }, `${name} (${count(tokens)} tokens)`)));
    const place = el("input", { type: "number", min: 0, max: info.tokens, value: info.tokens });
    const frozen = info.policy === "frozen";
    this.tokens = el("dd", {}, count(info.tokens));
    box.replaceChildren(
      el("h2", {}, info.name),
      el("dl", {}, el("dt", {}, "tokens"), this.tokens, ...fact("memory", frozen ? "frozen" : "learning"),
        ...fact("state", bytes(info.state_bytes)), ...fact("on the disk", bytes(info.bytes)),
        ...(info.parent ? fact("fork of", info.parent) : [])),
      form(() => desk.fork(info.name, copy.value.trim()), el("label", {}, "Fork as ", copy), el("button", { type: "submit" }, "Fork")),
      form(() => desk.change("POST", "/marks", { name: mark.value.trim() }), el("label", {}, "Mark here as ", mark), el("button", { type: "submit" }, "Mark")),
      ...(back.options.length ? [form(async () => {
        if (await this.sure(`Return to the mark “${back.value}”? What “${info.name}” read after it is forgotten.`, "Return")) await desk.change("POST", "/forget", { since: back.value });
      }, el("label", {}, "Return to ", back), el("button", { type: "submit" }, "Return"))] : []),
      form(async () => {
        const since = Number(place.value);
        if (await this.sure(`Forget all that “${info.name}” read after token ${count(since)}?`, "Forget")) await desk.change("POST", "/forget", { since });
      }, el("label", {}, "Forget after token ", place), el("button", { type: "submit" }, "Forget")),
      el("div", { class: "bar" },
        button(frozen ? "Let it learn" : "Freeze", () => desk.change("PATCH", "", { policy: frozen ? "learning" : "frozen" })),
        button("Reset", async () => {
          if (await this.sure(`Reset “${info.name}”? It forgets all ${count(info.tokens)} tokens.`, "Reset")) await desk.change("POST", "/reset", {});
        }),
        button("Delete", async () => {
          if (await this.sure(`Delete “${info.name}” and all it has learnt? There is no way back.`, "Delete")) await desk.remove(info.name);
        })),
      error,
    );
  }

  async compare() {
    const one = byId("one").value, other = byId("other").value, status = byId("differ-status");
    await this.attempt(byId("differ-error"), async () => {
      if (!one || !other || one === other) throw new Error("Choose two different sessions; a fork makes a second one.");
      status.textContent = "comparing…";
      try {
        const { layers } = await this.desk.api.get(this.desk.api.session(one, `/diff/${encodeURIComponent(other)}`));
        byId("difference").replaceChildren(apart(one, other, layers));
      } finally {
        status.textContent = "";
      }
    });
  }
}

// Per layer over all matrices, and each matrix, as a table with bars.
function apart(one, other, layers) {
  if (!layers.length) return el("p", {}, "This model has no memory that learns, so there is nothing to compare.");
  const rows = layers.flatMap(({ layer, matrices }) => [
    { title: `layer ${layer}`, whole: true, ...together(matrices.map(({ weight }) => weight)) },
    ...matrices.map(({ weight }, number) => ({ title: `matrix ${number}`, ...weight })),
  ]).map((row) => ({ ...row, relative: row.norm ? row.difference / row.norm : 0 }));
  const most = Math.max(...rows.map(({ relative }) => relative)) || 1;
  const columns = ["relative", "norm", "other_norm", "difference", "cosine"].map((key) => aligned(rows.map((row) => row[key])));
  const heads = ["", "", "‖A − B‖ / ‖A‖", "‖A‖", "‖B‖", "‖A − B‖", "cosine"];
  const table = el("table", { class: "apart" },
    el("caption", {}, `Weights of ${one} (A) and ${other} (B)`),
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map((row, place) => {
      const bar = el("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * row.relative) / most}%`;
      const numbers = columns.map((column) => el("td", {}, column[place]));
      return el("tr", { class: row.whole ? "whole" : "part" }, el("th", { scope: "row" }, row.title), el("td", { class: "chart" }, el("span", { class: "bar-of" }, bar)), ...numbers);
    })));
  return el("div", { class: "scroll", role: "region", "aria-label": "How far the memories are apart", tabindex: 0 }, table);
}

// Several matrices as one long vector.
function together(parts) {
  const norm = (key) => Math.hypot(...parts.map((part) => part[key]));
  const [a, b] = [norm("norm"), norm("other_norm")];
  const product = parts.reduce((sum, part) => sum + part.cosine * part.norm * part.other_norm, 0);
  return { norm: a, other_norm: b, difference: norm("difference"), cosine: a && b ? product / (a * b) : Number(a === b) };
}

function bytes(number) {
  const power = number >= 2 ** 20 ? 2 : number >= 1024 ? 1 : 0;
  return `${brief(number / 1024 ** power)} ${["bytes", "KiB", "MiB"][power]}`;
}
