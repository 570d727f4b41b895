"""Texts are cut as the rules that a file names say: these pieces were compared with llama.cpp's once.

Where both differ the model's own tokenizer is right: llama.cpp keeps marks apart from letters under gpt-4o
and tekken, does not cut before capitals under kimi-k2, youtu and tiny_aya, and knows the digits of ASCII only
under superbpe.
"""

import pytest

from truedraft.engine.formats.gguf_splits import BEGINS, EXPRESSIONS, WHOLE_WORDS, pre_tokenizer

TEXT = "I'LL don't 'tis sayWord e\u0301a 1234567 ½,\t世界abc\u3002\u3000かな ---/\r\n\n    ٣٤\u0665६! (x)  "
CUTS = (
    (
        "default",
        "I¦'¦LL¦ don¦'¦t¦ ¦'¦tis¦ sayWord¦ e¦\u0301¦a¦ ¦123¦456¦7¦ ¦½¦,¦\t¦世界abc¦\u3002¦\u3000¦かな¦"
        " ¦---/¦\r\n\n   ¦ ¦٣٤\u0665६¦!¦ ¦(¦x¦)¦  ",
    ),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
        "I¦'¦LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301¦a¦ 1234567¦ ½¦,¦\t¦世界abc¦\u3002¦\u3000¦かな¦ ---/¦"
        "\r\n\n   ¦ ٣٤\u0665६¦!¦ (¦x¦)¦  ",
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        "I¦'¦LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301¦a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t¦世界abc¦\u3002¦\u3000¦"
        "かな¦ ---/¦\r\n\n    ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
        "smaug-bpe chatglm-bpe glm4 glm5",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301a¦ ¦123¦456¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦   ¦ ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe ufakzeka",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "qwen35",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        "I'LL¦ don't¦ '¦tis¦ say¦Word¦ e\u0301a¦ ¦123¦456¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦   ¦ ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "tekken",
        "I¦'LL¦ don¦'t¦ '¦tis¦ say¦Word¦ e\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "kimi-k2",
        "I'LL¦ don't¦ '¦tis¦ say¦Word¦ e\u0301a¦ ¦123¦456¦7¦ ¦½¦,¦\t¦世界¦abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦   ¦ ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "youtu",
        "I'LL¦ don't¦ '¦tis¦ say¦Word¦ e\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t¦世界¦abc¦\u3002¦\u3000¦かな¦"
        " ---/\r\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "tiny_aya cohere2moe",
        "I'LL¦ don't¦ '¦tis¦ say¦Word¦ e\u0301a¦ ¦1¦234¦567¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦    ¦٣¦٤\u0665६¦!¦ (¦x¦)¦  ",
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e\u0301a¦ ¦123¦456¦7¦ ¦½¦,¦\t¦世界¦abc¦\u3002¦\u3000¦かな¦"
        " ---/\r\n\n¦    ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "deepseek-llm",
        "I¦'¦LL¦ don¦'¦t¦ '¦tis¦ sayWord¦ e¦\u0301¦a¦ ¦1234567¦ ¦½¦,¦\t¦世界¦abc¦\u3002¦"
        "\u3000¦かな¦ ---/¦\r¦\n¦\n¦    ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "deepseek-coder",
        "I¦'¦LL¦ don¦'¦t¦ '¦tis¦ sayWord¦ e¦\u0301¦a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t¦世界¦abc¦\u3002¦"
        "\u3000かな¦ ---/¦\r¦\n¦\n¦    ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "spark2_5",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t¦世界¦abc¦\u3002¦\u3000¦かな¦"
        " ---/¦\r¦\n¦\n¦    ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "seed-coder",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/¦\r\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "exaone-moe",
        "I¦'LL¦ don¦'t¦ '¦tis sayWord e\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r¦\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "minicpm5",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301a¦ ¦123¦456¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦    ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "superbpe",
        "I'LL don't 'tis sayWord e\u0301a ¦1¦234¦567¦ ¦½¦,\t世界abc\u3002\u3000かな ---/\r\n\n    ¦٣¦"
        "٤\u0665६¦! (x)  ",
    ),
    (
        "laguna",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r¦\n\n¦   ¦ ¦٣¦٤¦\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "jais-2",
        "I¦'LL¦ don¦'t¦ '¦tis¦ sayWord¦ e¦\u0301a¦ ¦123¦456¦7¦ ¦½¦,¦\t世界abc¦\u3002¦\u3000かな¦"
        " ---/\r\n\n¦  ¦ ¦ ¦٣٤\u0665¦६¦!¦ (¦x¦)¦  ",
    ),
    (
        "poro-chat bloom gpt3-finnish",
        "I'LL¦ don't¦ 'tis¦ sayWord¦ e\u0301a¦ 1234567¦ ½¦,\t¦世界abc¦\u3002\u3000¦かな¦ ---/¦"
        "\r\n\n   ¦ ٣٤\u0665६¦! (¦x¦)  ",
    ),
    (
        "viking",
        "I'LL¦ don't¦ 'tis¦ sayWord¦ e\u0301a¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦½¦,\t¦世界abc¦\u3002\u3000¦かな¦ ---/¦"
        "\r\n\n   ¦ ¦٣¦٤¦\u0665¦६¦! (¦x¦)  ",
    ),
    (
        "falcon",
        "I¦'¦LL¦ don¦'¦t¦ ¦'¦tis¦ sayWord¦ e¦\u0301¦a¦ ¦123¦456¦7¦ ½¦,¦\t¦世界abc¦\u3002¦\u3000¦かな¦"
        " ¦---/¦\r\n\n   ¦ ٣٤\u0665६¦!¦ ¦(¦x¦)¦  ",
    ),
)


@pytest.mark.parametrize(("names", "pieces"), CUTS, ids=[names.split()[0] for names, _ in CUTS])
def test_texts_are_cut_as_the_model_does_it(names: str, pieces: str) -> None:
    for name in names.split():
        found = [TEXT[start:end] for _, (start, end) in pre_tokenizer(name).pre_tokenize_str(TEXT)]
        assert found == pieces.split("¦"), name


def test_every_name_is_tested() -> None:
    names = [name for names, _ in CUTS for name in names.split()]
    assert sorted(names) == sorted(EXPRESSIONS)
    assert BEGINS < WHOLE_WORDS < EXPRESSIONS.keys()


def test_names_that_are_left_out_are_the_default() -> None:
    for name in (None, "", "default"):
        assert str(pre_tokenizer(name)) == str(pre_tokenizer("default"))
    with pytest.raises(KeyError):
        pre_tokenizer("other-bpe")
