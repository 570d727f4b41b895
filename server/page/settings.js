// The drawer of settings, and what a request asks for by them.

import { byId, button, element, keep, kept, numbers } from "./elements.js";
import { SAMPLING } from "./parameters.js";
import { SOURCES } from "./tokens.js";

const form = byId("settings-form");
const STORED = "settings";
const COMPLETION_TOKENS = 256; // a completion has no natural end, and OpenAI's default is 16

const EXAMPLES = {
  schema: { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] },
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Returns the weather of a city now.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
};

export function startSettings() {
  const drawer = byId("settings");
  const toggle = byId("settings-button");
  const show = (isOpen) => {
    drawer.hidden = !isOpen;
    toggle.setAttribute("aria-expanded", String(isOpen));
    keep("drawer", isOpen);
  };
  toggle.addEventListener("click", () => show(drawer.hidden));
  byId("close-settings").addEventListener("click", () => {
    show(false);
    toggle.focus();
  });
  byId("sampling").append(...SAMPLING.map(numberField));
  const sources = Object.entries(SOURCES).map(([value, [label]]) => element("option", { value, disabled: value === "prediction" }, label));
  sources.find(({ value }) => value === "prediction").textContent += " (by the API only)"; // this page sends none
  form.elements.method.append(...sources, element("option", { value: "none" }, "nothing"));
  restore();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", changed);
  form.addEventListener("reset", () => setTimeout(changed)); // after the fields have their first values again
  for (const [name, example] of Object.entries(EXAMPLES)) {
    byId(`${name}-field`).append(button("Insert an example", () => {
      form.elements[name].value = JSON.stringify(example, null, 2);
      changed();
    }));
  }
  changed();
  show(kept("drawer") === true);
}

/** Offers to draft from what can draft here, by the server's account. */
export function offerSources(proposers) {
  const { method } = form.elements;
  for (const option of method.options) option.hidden = !["", "none", ...proposers].includes(option.value);
  if (method.selectedOptions[0].hidden) method.value = "";
  changed();
}

function numberField({ label, ...field }) {
  const input = element("input", { ...field, type: "number" });
  return element("label", { className: "field" }, element("span", {}, label), input);
}

function changed() {
  keep(STORED, [...form.elements].filter(({ name }) => name).map(({ name, type, checked, value }) => [name, type === "checkbox" ? checked : value]));
  byId("schema-field").hidden = form.elements.format.value !== "json_schema";
  const isChanged = [...form.elements].some((field) =>
    field.type === "checkbox" ? field.checked !== field.defaultChecked
      : field.options ? field.selectedIndex > 0 : field.defaultValue !== undefined && field.value !== field.defaultValue);
  byId("settings-button").classList.toggle("changed", isChanged);
  byId("settings-button").title = isChanged ? "Some settings differ from the page's own" : "";
}

function restore() {
  for (const [name, value] of kept(STORED) ?? []) {
    const field = form.elements[name];
    if (!field) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
  }
}

/** Adapts the drawer to the mode: completions know no roles and no tools. */
export function showMode(mode) {
  for (const part of document.querySelectorAll(".chat-only")) part.hidden = mode === "completion";
  form.elements.max_tokens.placeholder = mode === "chat" ? "until it ends" : String(COMPLETION_TOKENS);
}

/** Returns the fields that the request has besides its prompt, and the system prompt. Throws what to mend. */
export function askedFields(mode, model) {
  const fields = form.elements;
  const stop = fields.stop.value.split("\n").filter(Boolean);
  const { max_tokens: limit } = numbers(form, ["max_tokens"]);
  const isStream = fields.stream.checked;
  const asked = {
    model,
    ...(mode === "chat" ? limit && { max_completion_tokens: limit } : { max_tokens: limit ?? COMPLETION_TOKENS }),
    ...numbers(form, SAMPLING.map(({ name }) => name)),
    ...(stop.length && { stop }),
    ...responseFormat(fields),
    stream: isStream,
    ...(isStream && { stream_options: { include_usage: true } }),
    speculation: speculation(fields),
  };
  if (mode === "completion") return asked;
  return {
    system: fields.system.value,
    ...asked,
    ...(fields.reasoning_effort.value && { reasoning_effort: fields.reasoning_effort.value }),
    ...tools(fields),
  };
}

function responseFormat(fields) {
  const type = fields.format.value;
  if (!type) return {};
  if (type === "json_object") return { response_format: { type } };
  return { response_format: { type, json_schema: { name: "answer", schema: json(fields.schema.value, "JSON schema") } } };
}

function tools(fields) {
  if (!fields.tools.value.trim()) return {};
  const given = json(fields.tools.value, "list of tools");
  return { tools: Array.isArray(given) ? given : [given], ...(fields.tool_choice.value && { tool_choice: fields.tool_choice.value }) };
}

function json(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The ${what} in the settings is not JSON: ${error.message}`);
  }
}

function speculation(fields) {
  return {
    ...(fields.method.value && { method: fields.method.value }),
    ...numbers(form, ["num_speculative_tokens"]),
    ...(fields.verification.value && { verification: fields.verification.value }),
    origins: fields.probabilities.checked ? true : "sources",
  };
}
