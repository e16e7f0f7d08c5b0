// Reading a text into the open session, piece by piece; it can be stopped and go on.

import { byId, count } from "./dom.js";

const FIRST = 400, LEAST = 100, MOST = 20000; // characters of a piece
const LARGE = 20000; // characters of a paste
const QUICK = 400, SLOW = 1500; // milliseconds that a piece may take

export class Reader {
  // `follow()` brings the end of what was read into view.
  constructor(desk, follow) {
    this.desk = desk;
    this.follow = follow;
    this.text = "";
    this.at = 0; // characters that were read
    this.size = FIRST;
    this.running = false;
    this.source = byId("source");
    this.error = byId("reader-error");
    byId("reader").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.start();
    });
    byId("discard").addEventListener("click", () => this.discard());
    byId("file").addEventListener("change", (event) => {
      if (event.target.files.length) this.load(event.target.files[0]);
      event.target.value = "";
    });
    this.source.addEventListener("input", () => this.discard());
    this.source.addEventListener("paste", (event) => {
      const text = event.clipboardData.getData("text/plain");
      if (text.length < LARGE || this.source.readOnly) return;
      event.preventDefault(); // browsers take long to insert a book as if it were typed
      this.source.setRangeText(text, this.source.selectionStart, this.source.selectionEnd, "end");
      this.discard();
    });
    const panel = byId("read");
    panel.addEventListener("dragover", (event) => {
      event.preventDefault();
      panel.classList.add("over");
    });
    panel.addEventListener("dragleave", () => panel.classList.remove("over"));
    panel.addEventListener("drop", (event) => {
      panel.classList.remove("over");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.load(event.dataTransfer.files[0]);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    this.show();
  }

  async load(file) {
    if (this.running) this.stop();
    const text = await file.text();
    if (text.includes("\0")) {
      this.error.textContent = `${file.name} is not a text: it has zero bytes in it. Choose a plain text file.`;
      return;
    }
    this.source.value = text;
    this.source.scrollTop = 0;
    this.discard();
    this.status(`${file.name}, ${count(text.length)} characters`);
    byId("go").focus();
  }

  stop() {
    this.running = false;
    byId("go").disabled = true; // until the piece on its way is there
  }

  discard() {
    if (this.running) return;
    this.text = "";
    this.at = 0;
    this.error.textContent = "";
    this.status("");
    this.show();
  }

  async start() {
    this.error.textContent = "";
    if (this.at === 0) this.text = this.source.value;
    if (!this.text) {
      this.error.textContent = "There is nothing to read. Paste a text above, or open a file.";
      this.source.focus();
      return;
    }
    this.running = true;
    this.show();
    this.follow();
    let tokens = 0;
    const begin = performance.now();
    try {
      if (!this.desk.info) await this.desk.create();
      const { name } = this.desk.info;
      while (this.running && this.at < this.text.length) {
        if (this.desk.info?.name !== name) break; // another session was opened
        const to = pieceEnd(this.text, this.at, this.size), sent = performance.now();
        const policy = byId("learn").checked ? "learning" : "frozen";
        tokens += await this.desk.append(this.text.slice(this.at, to), policy);
        this.at = to;
        const took = performance.now() - sent;
        if (took < QUICK) this.size = Math.min(MOST, 2 * this.size);
        else if (took > SLOW) this.size = Math.max(LEAST, this.size / 2);
        const speed = Math.round((1000 * tokens) / (performance.now() - begin));
        this.status(`${count(this.at)} of ${count(this.text.length)} characters, ${count(speed)} tokens/s`);
        byId("progress").value = this.at / this.text.length;
      }
    } catch (error) {
      this.error.textContent = `${error.message} What is left of the text stays here.`;
    }
    this.running = false;
    if (this.at && this.at === this.text.length) {
      this.at = 0;
      this.status(`read, ${count(tokens)} tokens`);
    }
    this.show();
    this.desk.refresh().catch(() => {});
  }

  status(text) {
    byId("status").textContent = text;
  }

  show() {
    const go = byId("go"), left = this.at > 0;
    go.disabled = false;
    go.textContent = this.running ? "Stop" : left ? "Go on" : "Read";
    byId("discard").hidden = this.running || !left;
    byId("progress").hidden = !this.running && !left;
    this.source.readOnly = this.running;
  }
}

// Where a piece of about `size` characters ends: before a blank if there is one, never within a character.
export function pieceEnd(text, from, size) {
  const far = Math.min(text.length, from + Math.round(size));
  if (far === text.length) return far;
  for (let at = far; at > from + size / 2; at--) {
    if (/\s/.test(text[at]) && !/\s/.test(text[at - 1])) return at;
  }
  const code = text.charCodeAt(far);
  return code >= 0xdc00 && code < 0xe000 ? far + 1 : far;
}
