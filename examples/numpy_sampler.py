"""Shows speculative sampling in plain numpy: two toy models, one loop, and a test that nothing is changed.

    python examples/numpy_sampler.py

The target knows which letter follows two letters of the text below, the draft only which one follows a
single letter. The loop is the one of both papers: draft K letters, score all of them with the target in
one call, keep a prefix, draw one more. It needs fewer calls of the target than plain sampling, and three
letters drawn by either are distributed alike.
"""

import argparse
from collections.abc import Callable

import numpy as np

TEXT = """
the quick brown fox jumps over the lazy dog and the dog runs after the fox until the fox is tired and the dog
is tired too then they lie down in the shade of the old tree and the quick fox tells the lazy dog a story
"""
LETTERS = sorted(set(TEXT))
IDS = {letter: number for number, letter in enumerate(LETTERS)}
V = len(LETTERS)

Probs = np.ndarray  # [letters of the text, vocabulary]
Model = Callable[[np.ndarray], Probs]


def counted(order: int) -> np.ndarray:
    """Returns the distribution of a letter after each ``order`` letters, none of it zero."""
    ids = [IDS[letter] for letter in TEXT]
    counts = np.full((V,) * (order + 1), 0.003)
    for place in range(order, len(ids)):
        counts[tuple(ids[place - order : place + 1])] += 1
    return counts / counts.sum(axis=-1, keepdims=True)


BIGRAMS, TRIGRAMS = counted(1), counted(2)
num_target_calls = 0


def draft_model(x: np.ndarray) -> Probs:
    return BIGRAMS[x]


def target_model(x: np.ndarray) -> Probs:
    """Returns a distribution after each letter of ``x``: one call scores them all."""
    global num_target_calls
    num_target_calls += 1
    return TRIGRAMS[np.concatenate([[IDS[" "]], x[:-1]]), x]


def sample(rng: np.random.Generator, probs: np.ndarray) -> int:
    return int(rng.choice(V, p=probs))


def plain_sampling(rng: np.random.Generator, model: Model, x: np.ndarray, n: int) -> np.ndarray:
    for _ in range(n):
        x = np.append(x, sample(rng, model(x)[-1]))
    return x


def speculative_sampling(rng: np.random.Generator, x: np.ndarray, n: int, k: int) -> np.ndarray:
    end = len(x) + n
    while len(x) < end:
        start = len(x)
        # 1. The draft model draws K letters one by one, fewer near the end.
        drafted = x
        for _ in range(min(k, end - start - 1)):
            drafted = np.append(drafted, sample(rng, draft_model(drafted)[-1]))
        p = draft_model(drafted)
        # 2. The target model scores all of them in one call.
        q = target_model(drafted)
        # 3. A letter is kept with probability min(1, q / p). At the first one that is not, a letter is drawn
        #    from what the draft left of the target.
        for place in range(start, len(drafted)):
            letter = drafted[place]
            if rng.random() < q[place - 1, letter] / p[place - 1, letter]:
                x = np.append(x, letter)
                continue
            rest = np.maximum(q[place - 1] - p[place - 1], 0)
            x = np.append(x, sample(rng, rest / rest.sum()))
            break
        else:
            # 4. All were kept: the target's last distribution gives one letter more.
            x = np.append(x, sample(rng, q[-1]))
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--letters", type=int, default=200)
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4000, help="for the comparison of distributions")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prompt = np.array([IDS[letter] for letter in "the "])
    begun = num_target_calls
    text = speculative_sampling(rng, prompt, args.letters, args.drafted)
    print("".join(LETTERS[number] for number in text).replace("\n", " "))
    calls = num_target_calls - begun
    print(f"\n{args.letters} letters in {calls} target calls: {args.letters / calls:.2f} letters per call")

    # The first three letters of many texts: how far are their frequencies from the target's probabilities?
    space = IDS[" "]
    exact = TRIGRAMS[IDS["e"], space][:, None, None] * TRIGRAMS[space][:, :, None] * TRIGRAMS
    samplers = {
        "plain sampling": lambda: plain_sampling(rng, target_model, prompt, 3),
        "speculative sampling": lambda: speculative_sampling(rng, prompt, 3, 2),
        "the draft alone": lambda: plain_sampling(rng, draft_model, prompt, 3),
    }
    for name, draw in samplers.items():
        seen = np.zeros((V, V, V))
        for _ in range(args.samples):
            seen[tuple(draw()[-3:])] += 1
        print(f"{name + ':':22}{abs(seen / args.samples - exact).sum() / 2:.3f} from the target's own")


if __name__ == "__main__":
    main()
