// The text, every token shaded. Tokens are elements only near what is visible; the rest is plain text of the same
// size, so that a long text scrolls like a short one and the browser's search finds all of it.

import { el } from "./dom.js";

export const LEVELS = 10;
const BLOCK = 400; // tokens

export class TextPane {
  constructor(trace, onPoint) {
    this.trace = trace;
    this.blocks = [];
    this.cursor = -1;
    this.level = () => 0;
    this.element = el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "The text, shaded" });
    this.seen = new IntersectionObserver((changes) => this.onSeen(changes), { root: this.element, rootMargin: "300px" });
    const point = (event) => {
      const token = event.target.closest(".t");
      if (token) onPoint(token.place);
    };
    this.element.addEventListener("pointermove", point);
    this.element.addEventListener("click", point);
  }

  clear() {
    for (const block of this.blocks) this.seen.unobserve(block.element);
    this.blocks = [];
    this.cursor = -1;
    this.element.replaceChildren();
  }

  // Show what the trace has now. Whoever looks at the end keeps looking at it.
  grow() {
    const pane = this.element;
    const following = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 40;
    let last = this.blocks.at(-1);
    let shown = last ? last.to : 0;
    if (last && last.to - last.from < BLOCK && shown < this.trace.length) {
      last.to = shown = Math.min(last.from + BLOCK, this.trace.length);
      this.fill(last, last.tokens !== null);
    }
    while (shown < this.trace.length) {
      last = { from: shown, to: Math.min(shown + BLOCK, this.trace.length), element: el("span"), tokens: null };
      last.element.block = last;
      this.fill(last, false);
      this.blocks.push(last);
      pane.append(last.element);
      this.seen.observe(last.element);
      shown = last.to;
    }
    if (following) this.toEnd();
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  // Shade by other numbers; `level` gives 0 … LEVELS - 1 for a token's place.
  shade(level) {
    this.level = level;
    for (const block of this.blocks) {
      block.tokens?.forEach((token, i) => (token.className = `t s${level(block.from + i)}`));
    }
    this.tokenAt(this.cursor)?.classList.add("at");
  }

  fill(block, asTokens) {
    const texts = this.trace.texts.slice(block.from, block.to);
    block.tokens = asTokens ? texts.map((text, i) => this.token(text, block.from + i)) : null;
    block.element.replaceChildren(...(block.tokens ?? [texts.join("")]));
  }

  token(text, place) {
    const at = place === this.cursor ? " at" : "";
    const token = el("span", { class: `t s${this.level(place)}${at}` }, text);
    token.place = place;
    return token;
  }

  onSeen(changes) {
    for (const { target, isIntersecting } of changes) {
      if (isIntersecting !== (target.block.tokens !== null)) this.fill(target.block, isIntersecting);
    }
  }

  tokenAt(place) {
    const block = this.blocks[Math.floor(place / BLOCK)];
    return block?.tokens?.[place - block.from];
  }

  moveTo(place, scroll) {
    this.tokenAt(this.cursor)?.classList.remove("at");
    this.cursor = place;
    const block = this.blocks[Math.floor(place / BLOCK)];
    if (!block) return;
    if (scroll && !block.tokens) this.fill(block, true);
    const token = this.tokenAt(place);
    token?.classList.add("at");
    if (!scroll || !token) return;
    const box = token.getBoundingClientRect(), pane = this.element.getBoundingClientRect();
    if (box.top < pane.top + 30 || box.bottom > pane.bottom - 30) {
      this.element.scrollTop += box.top - pane.top - pane.height / 2;
    }
  }

  // The token above (-1) or below (1) the cursor's.
  vertical(direction) {
    const here = this.tokenAt(this.cursor)?.getBoundingClientRect();
    if (!here) return this.cursor;
    let best = this.cursor, nearest = Infinity, line = null;
    for (let place = this.cursor + direction; place >= 0 && place < this.trace.length; place += direction) {
      const box = (this.tokenAt(place) ?? this.made(place)).getBoundingClientRect();
      if (Math.abs(box.top - here.top) < 4) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) > 4) break;
      const distance = Math.abs(box.left - here.left);
      if (distance < nearest) [best, nearest] = [place, distance];
    }
    return best;
  }

  made(place) {
    this.fill(this.blocks[Math.floor(place / BLOCK)], true);
    return this.tokenAt(place);
  }
}
