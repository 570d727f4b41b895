// Written by "python -m tools.write_parameters" from engine/parameters.py; change that.

export const SAMPLING = [
  {"name": "temperature", "label": "Temperature", "min": 0, "max": 2, "step": 0.1, "placeholder": "default"},
  {"name": "top_p", "label": "Top-p", "min": 0.01, "max": 1, "step": 0.01, "placeholder": "default"},
  {"name": "top_k", "label": "Top-k", "min": 0, "step": 1, "placeholder": "default"},
  {"name": "min_p", "label": "Min-p", "min": 0, "max": 1, "step": 0.01, "placeholder": "default"},
  {"name": "presence_penalty", "label": "Presence penalty", "min": -2, "max": 2, "step": 0.1, "placeholder": "0"},
  {"name": "frequency_penalty", "label": "Frequency penalty", "min": -2, "max": 2, "step": 0.1, "placeholder": "0"},
  {"name": "repetition_penalty", "label": "Repetition penalty", "min": 0.01, "max": 10, "step": 0.01, "placeholder": "default"},
  {"name": "seed", "label": "Seed", "step": 1, "placeholder": "random"},
];

// OpenAI's SDK has arguments of these names.
export const OPENAI = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"];
