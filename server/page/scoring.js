// The target model's own probabilities at each token of an answer that was generated without them.
//
// The prompt with the answer is read again, in one pass, which generates nothing. These are the model's
// probabilities before temperature, top-p and the like, so they need no repetition of the same draws.

import { postJson } from "./api.js";
import { requestFor, tokensOf } from "./conversation.js";

const NUM_RANKED = 5;
const scored = new WeakMap(); // an answer -> the promise of its prompt_logprobs, and how many tokens it is about

/** Returns what `TokenText` asks: the most likely tokens in a token's place, and the token itself. */
export function scorer(mode, turns, turn) {
  return async (token) => {
    const tokens = tokensOf(turn);
    if (scored.get(turn)?.length !== tokens.length) {
      const asking = ask(mode, turns, turn);
      scored.set(turn, { asking, length: tokens.length });
      asking.catch(() => scored.delete(turn)); // the next click may have more luck
    }
    const entries = await scored.get(turn).asking;
    const entry = entries[entries.length - tokens.length + tokens.indexOf(token)];
    if (!entry) throw new Error("The model gives no probability to the first token of a text.");
    return Object.entries(entry).map(([id, { decoded_token: text, logprob }]) => ({
      text,
      probability: Math.exp(logprob),
      isChosen: Number(id) === token.token_id,
    })).sort((one, other) => other.probability - one.probability);
  };
}

async function ask(mode, turns, turn) {
  const [, body] = requestFor(mode, turns, turns.indexOf(turn), turn.asked);
  const { model, prompt, messages, tools, tool_choice: choice, reasoning_effort } = body;
  const template = { messages, reasoning_effort, ...(tools && choice !== "none" && { tools }) };
  const { tokens: promptIds } = await postJson("tokenize", { model, ...(prompt === undefined ? template : { prompt }) });
  const answer = await postJson("v1/completions", {
    model,
    prompt: [...promptIds, ...tokensOf(turn).map((token) => token.token_id)],
    max_tokens: 0,
    echo: true,
    prompt_logprobs: NUM_RANKED,
  });
  return answer.choices[0].prompt_logprobs;
}
