"""Shows why scoring several tokens takes hardly longer than scoring one: the weights are read once for all.

    python examples/memory_argument.py [MODEL]

With one token, every weight of a model is read from memory for a single multiplication, and the processor
waits. With a few tokens more, it multiplies while it waits. Speculative sampling lives on that: it
computes more, and reads less for each token of the text. What is printed are the times of the target's
passes that the engine measured when it loaded the model. The larger the model and the faster the
processor, the longer the time of a pass stays flat; the bundled model is so small that a processor's cache
holds most of it.
"""

import argparse
from pathlib import Path

from truedraft import LLM, SamplingParams


def weight_bytes(target: Path) -> int:
    files = [target] if target.is_file() else target.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or a GGUF file; the bundled model without it")
    parser.add_argument("--draft", help="its draft model")
    args = parser.parse_args()
    llm = LLM(args.model, draft=args.draft)
    llm.generate("Once", SamplingParams(max_tokens=128, ignore_eos=True))
    num_bytes = weight_bytes(Path(str(llm.config.target)))
    times = {int(tokens): ms / 1e3 for tokens, ms in llm.speculation()["costs"]["score_ms_by_tokens"].items()}
    single = times[1]
    print(f"The target's weights have {num_bytes / 2**20:.0f} MiB. Its passes:\n")
    print(f"{'tokens':>6}{'time':>11}{'of one token':>14}{'a token':>12}{'weights read':>15}")
    for tokens, seconds in times.items():
        if tokens <= 32:
            of_one, per_token = seconds / single, 1e3 * seconds / tokens
            print(
                f"{tokens:>6}{1e3 * seconds:>8.2f} ms{of_one:>13.2f}x{per_token:>9.2f} ms"
                f"{num_bytes / seconds / 1e9:>10.1f} GB/s  {'#' * round(20 * of_one / tokens)}"
            )
    print(
        "\nThe bars are the time of a token. As long as a pass of several tokens takes about as long as"
        "\none of a single token, a drafted token that is kept is almost free. Where the time of a token no"
        "\nlonger falls, the processor is busy with arithmetic, and drafting more would not help."
    )


if __name__ == "__main__":
    main()
