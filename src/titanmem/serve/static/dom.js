// Elements, numbers and files. What people or the model wrote only ever becomes a text node.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

// A token on one line, its blanks visible.
export function spelt(text, id) {
  if (text === "") return `#${id}`;
  const shown = text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  return shown.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "·");
}

export function count(number) {
  return number.toLocaleString("en");
}

// Five digits at most, which is what travels; powers of ten where those would say nothing.
export function decimal(number) {
  if (number == null || Number.isNaN(number)) return "–";
  const size = Math.abs(number);
  if (size !== 0 && (size < 0.001 || size >= 10000)) return number.toExponential(2);
  return number.toFixed(size < 10 ? 4 : size < 100 ? 3 : 2);
}

// A column of a table, every row in the same form, so that digits stand below digits.
export function aligned(numbers) {
  const most = Math.max(...numbers.map((number) => Math.abs(number || 0)));
  const decimals = Math.max(0, Math.min(5, most ? 4 - Math.floor(Math.log10(most)) : 0));
  const shown = (number) => (most && most < 0.001 ? number.toExponential(2) : number.toFixed(decimals));
  return numbers.map((number) => (number == null || Number.isNaN(number) ? "–" : shown(number)));
}

// For axes.
export function brief(number) {
  if (number == null || !Number.isFinite(number)) return "";
  const size = Math.abs(number);
  if (size !== 0 && (size < 0.001 || size >= 10000)) return number.toExponential(1);
  return String(Number(number.toPrecision(size < 0.01 ? 2 : 3)));
}

export function saveFile(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
