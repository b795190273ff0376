// Questions to the server, and addresses of pages: #/name?parameters.

export async function get(name, parameters) {
  const response = await fetch(`/api/${name}?${query(parameters)}`);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  return body;
}

function query(parameters) {
  const given = Object.entries(parameters ?? {});
  return new URLSearchParams(given.filter(([, v]) => v !== undefined && v !== null && v !== ""));
}

export const link = (page, parameters) => `#/${page}?${query(parameters)}`;

export function place() {
  const [page, parameters] = location.hash.replace(/^#\/?/, "").split("?");
  return { page, parameters: Object.fromEntries(new URLSearchParams(parameters ?? "")) };
}

// Changes the address without a new entry in the history.
export function replace(page, parameters) {
  history.replaceState(null, "", link(page, parameters));
}

export const FILTERS =
  ["order", "status", "tool", "error", "dropped", "min_reward", "max_reward", "group", "text"];

export const filters = (parameters) =>
  Object.fromEntries(FILTERS.filter((name) => parameters[name]).map((n) => [n, parameters[n]]));
