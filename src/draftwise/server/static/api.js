// Talking to the server: JSON, errors in OpenAI's form, server-sent events.

let key = "";
let onUnauthorized = () => {};
let onUnreachable = () => {};

/** Use this key from now on. Kept for the tab's life, where the browser lets us. */
export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem("draftwise.key", value);
  } catch {
    // Storage is switched off: the key lives as long as the page.
  }
}

export function restoreKey() {
  try {
    key = sessionStorage.getItem("draftwise.key") ?? "";
  } catch {
    key = "";
  }
}

/** `callback()` is called when no answer comes at all. */
export function whenUnreachable(callback) {
  onUnreachable = callback;
}

/** `callback(hadKey)` is called when the server answers 401. */
export function whenUnauthorized(callback) {
  onUnauthorized = callback;
}

export class ApiError extends Error {
  constructor(status, message, { param = null, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The server's answer, whatever its status. Throws ApiError when there is none. */
export async function open(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    onUnreachable();
    throw new ApiError(0, "The server cannot be reached. Is it still running?");
  }
  if (response.status === 401) onUnauthorized(Boolean(key));
  return response;
}

async function request(path, options = {}) {
  const response = await open(path, options);
  if (response.ok) return response;
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Not from this server (a proxy, perhaps): the status has to do.
  }
  throw new ApiError(response.status, detail.message ?? `The server answered ${response.status}.`, {
    param: detail.param,
    code: detail.code,
    retryAfter: response.headers.get("retry-after"),
  });
}

export async function getJSON(path, options) {
  return (await request(path, options)).json();
}

export async function getText(path, options) {
  return (await request(path, options)).text();
}

/** Chunks of a streamed answer, as objects. Ends at [DONE]; an error inside the stream is thrown as ApiError. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      buffer += decoder.decode(value, { stream: true }).replaceAll("\r\n", "\n");
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const data = dataOf(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (data === "[DONE]") return;
        if (!data) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) {
          throw new ApiError(Number(chunk.error.status) || 500, chunk.error.message ?? "generation failed", chunk.error);
        }
        yield chunk;
      }
    }
    onUnreachable();
    throw new ApiError(0, "The stream ended before the answer did.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The data of one event. Example: "event: x\ndata: {\ndata: }" is "{\n}". */
function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
