// Reading an OpenAPI document: pure functions from its parts to words and examples.

/** The type of a schema in words. Example: {anyOf: [{type: "integer"}, {type: "null"}]} is "integer or null". */
export function typeOf(schema) {
  if (schema.anyOf) return [...new Set(schema.anyOf.map(typeOf))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  return schema.type ?? "anything";
}

/** Rows for the fields of an object: name, type, default, description, whether it must be there; those first. */
export function fieldsOf(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => ({
    name,
    type: typeOf(field),
    // "None" of a field that may be left out says nothing more than that.
    initial: field.default === undefined || field.default === null ? "" : JSON.stringify(field.default),
    text: field.description ?? "",
    required: required.has(name),
  }));
  return [...rows.filter((row) => row.required), ...rows.filter((row) => !row.required)];
}

/** The operations of a document, in its order. */
export function operationsOf(document) {
  return Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => {
      const body = operation.requestBody?.content?.["application/json"];
      return {
        method: method.toUpperCase(),
        path,
        summary: operation.summary ?? "",
        parameters: (operation.parameters ?? []).filter((parameter) => parameter.in === "path"),
        schema: body?.schema ?? null,
        example: body?.example ?? null,
        responses: Object.entries(operation.responses ?? {}),
      };
    }),
  );
}

/** A path with its parameters filled in. A name may hold slashes, as names of models do.
 *  Example: "/v1/models/{name}" with {name: "a/b c"} is "v1/models/a/b%20c". */
export function filled(path, values) {
  return path
    .replace(/\{(\w+)(?::\w+)?\}/g, (_, name) => (values[name] ?? "").split("/").map(encodeURIComponent).join("/"))
    .replace(/^\//, "");
}

/** JSON on several lines; what is no JSON as it is. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
