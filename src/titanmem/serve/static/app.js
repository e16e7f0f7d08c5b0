// The inspector: one sees the memory learn. Views share a desk (desk.js); each of them has a file of its own.

import { Api } from "./api.js";
import { Asker } from "./asker.js";
import { Desk } from "./desk.js";
import { byId, count, el } from "./dom.js";
import { Reader } from "./reader.js";
import { Reading } from "./reading.js";
import { Sessions } from "./sessions.js";

const VIEWS = ["read", "ask", "sessions"];

// A dialog's answer: the value of the button that closed it.
function answered(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

async function askKey(reason) {
  byId("key-reason").textContent = reason;
  byId("key-value").value = "";
  const use = await answered(byId("key-dialog"));
  return use ? byId("key-value").value.trim() || null : null;
}

async function sure(text, yes) {
  byId("sure-text").textContent = text;
  byId("sure-yes").textContent = yes;
  return (await answered(byId("sure"))) === "yes";
}

function view(name, focus = false) {
  for (const other of VIEWS) {
    const tab = byId(`tab-${other}`), here = other === name;
    byId(other).hidden = !here;
    tab.setAttribute("aria-selected", here);
    tab.tabIndex = here ? 0 : -1;
    if (here && focus) tab.focus();
  }
}

function tabs() {
  for (const name of VIEWS) {
    byId(`tab-${name}`).addEventListener("click", () => (location.hash = name));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = VIEWS[(VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length];
      location.hash = next;
      view(next, true);
    });
  }
  const follow = () => view(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : VIEWS[0]);
  window.addEventListener("hashchange", follow);
  follow();
}

function start() {
  const api = new Api(askKey), desk = new Desk(api);
  const reading = new Reading(desk.trace, () => desk.info?.name ?? "titanmem");
  byId("read").append(reading.element);
  const reader = new Reader(desk, () => reading.text.toEnd());
  new Asker(desk);
  new Sessions(desk, sure);
  tabs();

  const failure = byId("failure"), choice = byId("session");
  const attempt = async (act) => {
    failure.textContent = "";
    try {
      await act();
    } catch (error) {
      failure.textContent = error.message;
    }
  };
  const about = () => {
    const { info } = desk;
    byId("about").textContent = info ? `${count(info.tokens)} tokens${info.policy === "frozen" ? ", frozen" : ""}` : "";
  };
  const list = () => {
    const none = desk.info ? [] : [el("option", { value: "" }, desk.names.length ? "choose…" : "made by reading")];
    choice.replaceChildren(...none, ...desk.names.map((name) => el("option", { value: name }, name)));
    choice.value = desk.info?.name ?? "";
  };
  desk.addEventListener("sessions", list);
  desk.addEventListener("session", () => {
    list();
    about();
    reading.open(desk.trace, reader.running);
  });
  desk.addEventListener("trace", () => {
    about();
    reading.grown();
  });
  choice.addEventListener("change", () => attempt(() => desk.open(choice.value)));

  const load = () => attempt(async () => {
    byId("model").textContent = (await api.get("/v1/models")).data[0].id;
    await desk.refresh();
    const first = (await api.get("/v1/sessions")).data[0]; // the last used
    if (first) await desk.open(first.name);
    else desk.close();
  });
  const key = byId("key");
  key.hidden = !api.key; // until it is known that one is needed
  api.onKey = () => {
    key.hidden = false;
    key.textContent = api.key ? "Forget key" : "Key";
  };
  if (api.key) api.onKey();
  key.addEventListener("click", async () => {
    if (api.key) {
      api.key = null;
      desk.tree = [];
      desk.traces.clear();
      desk.close();
      desk.tell("sessions");
      failure.textContent = "The key is forgotten. Press “Key” to give another.";
      return;
    }
    const given = await askKey("");
    if (!given) return;
    api.key = given;
    await load();
  });
  load();
}

start();
