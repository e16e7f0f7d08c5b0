// What all views share: the server, its sessions, the one that is open, and what this page has seen it read.

import { Trace } from "./trace.js";

export class Desk extends EventTarget {
  constructor(api) {
    super();
    this.api = api;
    this.tree = [];
    this.info = null; // of the open session
    this.traces = new Map(); // by name
    this.trace = new Trace();
  }

  get names() {
    const below = (nodes) => nodes.flatMap((node) => [node.name, ...below(node.forks)]);
    return below(this.tree);
  }

  // `what` changed: "sessions" (the list), "session" (which is open), "trace" (what it read).
  tell(what) {
    this.dispatchEvent(new Event(what));
  }

  async refresh() {
    this.tree = (await this.api.get("/v1/sessions/tree")).data;
    this.tell("sessions");
  }

  async open(name) {
    const info = await this.api.get(this.api.session(name));
    const known = this.traces.get(name), trace = known?.end === info.tokens ? known : new Trace();
    this.traces.set(name, trace);
    this.info = info;
    this.trace = trace;
    this.tell("session");
    if (trace.length || !info.tokens) return;
    const last = await this.api.get(this.api.session(name, "/trace")); // of a long turn it takes a while
    if (!last.ids.length || trace.length || this.trace !== trace) return;
    trace.add(last);
    this.tell("session");
  }

  async create(name = "") {
    const info = await this.api.post("/v1/sessions", { name });
    await this.refresh();
    await this.open(info.name);
  }

  async fork(name, copy) {
    const info = await this.api.post(this.api.session(name, "/fork"), { name: copy });
    if (this.traces.has(name)) this.traces.set(info.name, this.traces.get(name).copy());
    await this.refresh();
    await this.open(info.name);
  }

  async remove(name) {
    await this.api.call("DELETE", this.api.session(name));
    this.traces.delete(name);
    await this.refresh();
    if (this.info?.name !== name) return;
    if (this.names.length) await this.open(this.names[0]);
    else this.close();
  }

  close() {
    this.info = null;
    this.trace = new Trace();
    this.tell("session");
  }

  // Do something to the open session that answers with what it is now; what was read behind its end is gone.
  async change(method, rest, body) {
    const { name } = this.info;
    this.info = await this.api.call(method, this.api.session(name, rest), body);
    this.trace.cut(this.info.tokens);
    await this.refresh();
    this.tell("session");
  }

  // Let the open session read a piece.
  async append(text, policy) {
    const { name, tokens } = this.info, { trace } = this;
    const answer = await this.api.post(this.api.session(name, "/append"), { text, policy, expect: tokens, trace: true });
    const anew = trace.add(answer.trace);
    if (this.info?.name !== name) return answer.appended; // another was opened meanwhile
    delete answer.trace;
    this.info = answer;
    this.tell(anew ? "session" : "trace");
    return answer.appended;
  }
}
