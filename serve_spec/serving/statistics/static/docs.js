"use strict";

const byId = (id) => document.getElementById(id);

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
}

let schemas;

const nameOf = (reference) => reference.split("/").at(-1);
const resolved = (schema) => (schema.$ref ? schemas[nameOf(schema.$ref)] ?? {} : schema);

// A schema in a few words.
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return [...new Set(several.map(typeOf))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "any"}`;
  return schema.type ?? "any";
}

function fieldTable(rows) {
  const head = element("tr", "");
  head.append(...["field", "type", "default", "meaning"].map((name) => element("th", name)));
  const table = element("table", "", head);
  table.append(...rows.map((cells) => element("tr", "", ...cells.map((cell) => element("td", cell)))));
  return table;
}

function fields(schema) {
  const { properties = {}, required = [] } = resolved(schema);
  return Object.entries(properties).map(([name, field]) => {
    const preset = required.includes(name) ? "required" : JSON.stringify(field.default) ?? "";
    return [name, typeOf(field), preset, field.description ?? ""];
  });
}

function operation(path, method, { summary, description, parameters = [], requestBody, responses }) {
  const shown = element("details", "", element("summary", `${method.toUpperCase()} ${path}`));
  shown.append(element("p", description ?? summary ?? ""));
  const rows = parameters.map((p) =>
    [`${p.name} (${p.in})`, typeOf(p.schema ?? {}), p.required ? "required" : "", p.description ?? ""]);
  const body = requestBody?.content?.["application/json"]?.schema;
  if (body) rows.push(...fields(body));
  if (rows.length) shown.append(fieldTable(rows));
  for (const [status, answer] of Object.entries(responses ?? {})) {
    const types = Object.values(answer.content ?? {}).map(({ schema }) => schema && typeOf(schema));
    const of = types.filter(Boolean).join(", ");
    shown.append(element("p", `${status}: ${answer.description}${of ? ` (${of})` : ""}`));
  }
  return shown;
}

// What fields and answers refer to by name.
function types() {
  return Object.keys(schemas).sort().map((name) => {
    const shown = element("details", "", element("summary", name));
    shown.append(element("p", schemas[name].description ?? ""), fieldTable(fields(schemas[name])));
    return shown;
  });
}

async function load() {
  try {
    const answer = await fetchWithKey("openapi.json");
    if (answer.status === 401) throw new Error("give the API key on the status page first");
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const api = await answer.json();
    schemas = api.components?.schemas ?? {};
    byId("version").textContent = api.info.version;
    const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, each]) => operation(path, method, each)));
    byId("operations").append(...operations, element("h2", "Types"), ...types());
    byId("state").textContent = `${operations.length} operations`;
  } catch (error) {
    byId("state").textContent = `no response: ${error.message}`;
    byId("state").className = "bad";
  }
}

load();
