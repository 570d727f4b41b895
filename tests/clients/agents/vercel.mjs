// One streamed turn with a tool through Vercel's `ai`: node vercel.mjs URL KIND
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, kind] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: 'none' };
const name = 'tiny-model';
const models = {
  chat: () => createOpenAI(settings).chat(name),
  responses: () => createOpenAI(settings).responses(name),
  compatible: () => createOpenAICompatible({ ...settings, name: 'truedraft' })(name),
  messages: () => createAnthropic(settings)(name),
};

let ran = 0;
const result = streamText({
  model: models[kind](),
  prompt: 'Add.',
  maxOutputTokens: 200,
  maxRetries: 0,
  // Nothing is stored by the server, so the library has to send all items of a conversation.
  providerOptions: { openai: { store: false } },
  tools: {
    add: tool({
      description: 'Adds.',
      inputSchema: z.object({ a: z.number() }),
      execute: async ({ a }) => {
        ran += 1;
        return `truedraft-${a + 41}`;
      },
    }),
  },
  stopWhen: stepCountIs(3),
  onError: ({ error }) => {
    console.error(error);
    process.exit(1);
  },
});
let text = '';
for await (const delta of result.textStream) text += delta;
console.log(JSON.stringify({ text, ran }));
