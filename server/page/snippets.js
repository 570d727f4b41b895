// A request as text to copy: for curl, and for Python with OpenAI's SDK.

import { hasKey } from "./api.js";
import { byId, copyButton } from "./elements.js";
import { OPENAI } from "./parameters.js";

// What the SDK's functions have as parameters of their own; the others go into its `extra_body`.
const COMMON = [...OPENAI, "model", "stop", "stream", "stream_options"];
const NAMED = {
  "v1/chat/completions": [...COMMON, "messages", "max_completion_tokens", "response_format", "tools", "tool_choice", "reasoning_effort"],
  "v1/completions": [...COMMON, "prompt", "max_tokens"],
};

/** Leaves out what the page alone needs, to show where tokens come from and to count them. */
function asSent({ stream_options: _, speculation = {}, ...body }) {
  const { origins, ...others } = speculation;
  if (origins === true) others.origins = origins;
  return Object.keys(others).length ? { ...body, speculation: others } : body;
}

export function asCurl(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  return [
    `curl${body.stream ? " -N" : ""} ${quoted(new URL(path, document.baseURI).href)}`,
    "-H 'Content-Type: application/json'",
    ...(hasKey() ? ['-H "Authorization: Bearer $OPENAI_API_KEY"'] : []),
    `-d ${quoted(JSON.stringify(asSent(body), null, 2))}`,
  ].join(" \\\n  ");
}

export function asPython(path, body) {
  const isChat = path === "v1/chat/completions";
  const sent = asSent(body);
  const named = Object.entries(sent).filter(([name]) => NAMED[path].includes(name));
  const extra = Object.fromEntries(Object.entries(sent).filter(([name]) => !NAMED[path].includes(name)));
  const parameters = [...named, ...(Object.keys(extra).length ? [["extra_body", extra]] : [])];
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(new URL("v1", document.baseURI).href)}${hasKey() ? "" : ', api_key="unused"'})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...parameters.map(([name, value]) => `    ${name}=${literal(value, "    ")},`),
    ")",
    ...(body.stream
      ? ["for chunk in answer:", "    if chunk.choices:", `        print(${isChat ? 'chunk.choices[0].delta.content or ""' : "chunk.choices[0].text"}, end="", flush=True)`, "print()"]
      : [`print(answer.choices[0].${isChat ? "message" : "text"})`]),
    "",
  ].join("\n");
}

/** Writes a JSON value as Python. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, `${indent}    `))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, `${indent}    `)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.map((item) => `${indent}    ${item},\n`).join("")}${indent}${close}` : open + close;
}

let shown = null; // path and body

export function startSnippets() {
  for (const choice of byId("code-form").elements.language) choice.addEventListener("change", show);
  byId("copy-code").append(copyButton(() => byId("code-text").textContent, ""));
}

export function openSnippets(path, body) {
  shown = [path, body];
  byId("key-hint").hidden = !hasKey();
  show();
  byId("code-dialog").showModal();
}

function show() {
  const write = byId("code-form").elements.language.value === "python" ? asPython : asCurl;
  byId("code-text").textContent = write(...shown);
}
