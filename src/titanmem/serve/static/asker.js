// What the model expects after a prompt, with a fresh, the frozen and the learning memory side by side.

import { byId, decimal, el, spelt } from "./dom.js";

const READINGS = {
  fresh: "Fresh memory: it knows the prompt alone.",
  frozen: "The session’s memory, which reads the prompt and does not change.",
  learning: "The session’s memory, which also learns from the prompt.",
};

export class Asker {
  constructor(desk) {
    this.desk = desk;
    byId("asker").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask();
    });
    desk.addEventListener("session", () => {
      if (desk.info?.name !== this.asked) byId("answers").replaceChildren();
    });
    byId("answers").addEventListener("pointerover", (event) => this.light(event.target.closest("li")?.dataset.id));
    byId("answers").addEventListener("pointerleave", () => this.light());
  }

  async ask() {
    const error = byId("asker-error"), status = byId("asker-status"), text = byId("prompt").value;
    error.textContent = "";
    if (!this.desk.info) error.textContent = "There is no session yet. Read a text first, or make a session under Sessions.";
    else if (!text) error.textContent = "Type a text to go on from.";
    if (error.textContent) return;
    status.textContent = "reading…";
    try {
      const { name } = this.desk.info;
      const found = await this.desk.api.post(this.desk.api.session(name, "/compare"), { text, top: Number(byId("top").value) });
      this.asked = name;
      const most = Math.max(...Object.values(found).flatMap(({ next }) => next.map(({ probability }) => probability)));
      byId("answers").replaceChildren(...Object.keys(READINGS).map((reading) => this.answer(reading, found[reading], most)));
    } catch (problem) {
      error.textContent = problem.message;
    }
    status.textContent = "";
  }

  // `most` is the longest bar's probability, in all three.
  answer(reading, { next, entropy, prompt_nll: nll }, most) {
    const rows = next.map(({ id, text, probability }) => {
      const bar = el("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * probability) / most}%`;
      const percent = `${(100 * probability).toFixed(2)} %`;
      return el("li", { "data-id": id, title: `id ${id}` }, el("code", {}, spelt(text, id)), el("span", { class: "bar-of" }, bar), el("b", {}, percent));
    });
    const facts = el("dl", {}, el("dt", {}, "entropy"), el("dd", {}, `${decimal(entropy)} nats`),
      el("dt", {}, "prompt’s −log p"), el("dd", {}, nll === null ? "–" : `${decimal(nll)} nats`));
    const title = `${reading[0].toUpperCase()}${reading.slice(1)}`;
    return el("section", { class: "card answer", "aria-label": `${title} memory` },
      el("h2", {}, title), el("p", { class: "quiet" }, READINGS[reading]), facts, el("ol", {}, ...rows));
  }

  // The same token in all three.
  light(id) {
    for (const row of byId("answers").querySelectorAll("li")) row.classList.toggle("same", id !== undefined && row.dataset.id === id);
  }
}
