// The server. A key is asked for when one is needed and stays in this tab's sessionStorage.

const KEY = "titanmem-key";
const SILENT = "The server does not answer. See whether titanmem serve still runs, then try again.";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  // `askKey(reason)` gives a key, or null if nobody has one.
  constructor(askKey) {
    this.askKey = askKey;
    this.onKey = () => {};
  }

  get key() {
    return sessionStorage.getItem(KEY);
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    this.onKey();
  }

  async call(method, path, body) {
    for (;;) {
      const used = this.key;
      try {
        return await this.once(method, path, body, used);
      } catch (error) {
        if (error.status !== 401) throw error;
        if (this.key === used) {
          this.key = null;
          this.asking ??= this.askKey(used ? "The server does not know this key." : "").finally(() => (this.asking = null));
          const given = await this.asking;
          if (!given) throw new ApiError("This server needs an API key. Press “Key” above to give one.", 401, error.code);
          this.key = given;
        }
      }
    }
  }

  async once(method, path, body, key) {
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch {
      throw new ApiError(SILENT, 0);
    }
    const told = await answer.json().catch(() => null);
    if (answer.ok && !told) throw new ApiError(SILENT, 0); // it died before the end of what it said
    if (answer.ok) return told;
    const error = told?.error;
    throw new ApiError(advice(error?.message ?? `status ${answer.status}`, error?.code, answer.headers), answer.status, error?.code);
  }

  get(path) {
    return this.call("GET", path);
  }

  post(path, body = {}) {
    return this.call("POST", path, body);
  }

  session(name, rest = "") {
    return `/v1/sessions/${encodeURIComponent(name)}${rest}`;
  }
}

// The server's reason, and what to do about it where that is not said.
function advice(message, code, headers) {
  const seconds = headers.get("Retry-After");
  const more = {
    session_not_found: "It may have been deleted elsewhere; reload the page.",
    session_exists: "Choose another name.",
    session_moved_on: "Somebody else wrote to it, or the last piece did arrive; open it again under Sessions.",
    insufficient_quota: "Delete sessions that are no longer needed.",
    internal_error: "Try again; if it stays, the terminal of titanmem serve shows the reason.",
  }[code] ?? (seconds ? `Try again in ${seconds} s.` : "");
  const text = `${message[0].toUpperCase()}${message.slice(1)}`;
  return `${/[.!?]$/.test(text) ? text : `${text}.`} ${more}`.trim();
}
