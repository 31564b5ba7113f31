// Colours for canvases, read off the style sheet; anew when the theme changes.

let cache = new Map();

export function forgetColours() {
  cache = new Map();
}

function read(property, attribute = null) {
  const key = `${property} ${attribute}`;
  if (!cache.has(key)) {
    const probe = document.createElement("span");
    probe.className = "probe";
    if (attribute) probe.setAttribute("data-method", attribute);
    document.body.append(probe);
    cache.set(key, getComputedStyle(probe).getPropertyValue(property).trim());
    probe.remove();
  }
  return cache.get(key);
}

export const methodColour = (method) => read("--m", method);
export const KIND_COLOURS = () => ({ line: read("--line"), own: read("--own") });
